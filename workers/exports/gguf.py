"""GGUF files, by llama.cpp's converter."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from app.contract.export import ExportType
from workers.exports.modelfile import NAME
from workers.exports.protocol import ExportTask
from workers.exports.refusal import NotExported

_SECONDS = 3 * 3600.0
_NAMES: dict[ExportType, str] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "q8_0": "q8_0"}
FILE = "model.gguf"


def convert(task: ExportTask, merged: Path, type_: ExportType, staged: Path) -> tuple[Path, Any, Any]:
    """Converts a whole model into a folder with one GGUF file and a Modelfile.

    Returns:
        The folder; the model as transformers reads it from the file; and the tokenizer of the merged model,
        with whose tokens those of the file agree.

    Raises:
        NotExported: the converter is not installed, or fails; or its file cannot be read back, or has other
            tokens or another chat template.
    """
    if task.converter is None:
        raise NotExported(
            "GGUF needs llama.cpp's convert_hf_to_gguf.py: set ACCRUE_GGUF_CONVERTER to its path on the "
            "worker",
        )
    target = merged.with_name("gguf")
    target.mkdir()
    command = [
        sys.executable,
        task.converter,
        str(merged),
        "--outtype",
        _NAMES[type_],
        "--outfile",
        str(target / FILE),
    ]
    try:
        made = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotExported(f"the GGUF converter failed ({type(error).__name__})") from None
    if made.returncode or not (target / FILE).is_file():
        lines = made.stderr.strip().splitlines() or ["it wrote no file"]
        raise NotExported(f"the GGUF converter failed: {lines[-1][:500]}")
    modelfile = (merged / NAME).read_text().replace("FROM .\n", f"FROM ./{FILE}\n")
    (target / NAME).write_text(modelfile)
    model, tokenizer = _loaded(target, merged)
    shutil.rmtree(merged)
    target.rename(merged)
    return merged, model, tokenizer


def _loaded(folder: Path, merged: Path) -> tuple[Any, Any]:
    """The model of a GGUF file, its weights widened to fp32; and the tokenizer, if the file has the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(merged, local_files_only=True)
    try:
        from gguf import GGUFReader

        _check_vocabulary(GGUFReader(folder / FILE).fields, tokenizer)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    except (ImportError, ValueError, OSError, LookupError, NotImplementedError, AttributeError) as error:
        raise NotExported(
            f"the GGUF file could not be read back to compare it ({type(error).__name__}): this needs the "
            "package gguf on the worker, and transformers reads only some families from GGUF",
        ) from None
    return model, tokenizer


def _check_vocabulary(fields: Mapping[str, Any], tokenizer: Any) -> None:
    """Checks that a file has the tokenizer's tokens and chat template.

    Raises:
        NotExported: it has others.
    """
    own = fields["tokenizer.ggml.tokens"].contents()
    added = set(tokenizer.get_added_vocab().values())  # of which the converter may normalise the text
    expected = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    same = len(own) >= len(expected) and all(
        token in added or text == wanted
        for token, (text, wanted) in enumerate(zip(own, expected, strict=False))
    )
    template = fields["tokenizer.chat_template"].contents() if "tokenizer.chat_template" in fields else None
    if not same or template != tokenizer.chat_template:
        what = "other tokens" if not same else "another chat template"
        raise NotExported(f"the GGUF file has {what} than the model")
