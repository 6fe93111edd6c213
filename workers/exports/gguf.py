"""GGUF files, by llama.cpp's converter."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from app.contract.export import ExportType
from workers.exports.modelfile import NAME
from workers.exports.protocol import ExportTask
from workers.training.exceptions import CannotTrain

_SECONDS = 3 * 3600.0
_NAMES: dict[ExportType, str] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "q8_0": "q8_0"}
FILE = "model.gguf"


def convert(task: ExportTask, merged: Path, type_: ExportType, staged: Path) -> tuple[Path, Any, Any]:
    """Converts a whole model into a folder with one GGUF file and a Modelfile.

    Returns:
        The folder; and the model and its tokenizer as transformers reads them from the file.

    Raises:
        CannotTrain: the converter is not installed, or fails.
    """
    if task.converter is None:
        raise CannotTrain(
            "not_installed",
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
        raise CannotTrain("not_converted", f"the GGUF converter failed ({type(error).__name__})") from None
    if made.returncode or not (target / FILE).is_file():
        lines = made.stderr.strip().splitlines() or ["it wrote no file"]
        raise CannotTrain("not_converted", f"the GGUF converter failed: {lines[-1][:500]}")
    modelfile = (merged / NAME).read_text().replace("FROM .\n", f"FROM ./{FILE}\n")
    (target / NAME).write_text(modelfile)
    model, tokenizer = _loaded(target)
    shutil.rmtree(merged)
    target.rename(merged)
    return merged, model, tokenizer


def _loaded(folder: Path) -> tuple[Any, Any]:
    """The model of a GGUF file, its weights widened to fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    except (ImportError, ValueError, OSError, KeyError, NotImplementedError) as error:
        raise CannotTrain(
            "not_verified",
            f"the GGUF file could not be read back to compare it ({type(error).__name__}): transformers "
            "reads only some families from GGUF, with the package gguf installed on the worker",
        ) from None
