"""Saves a trained model, or its adapters, with what was changed for training restored."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from app.contract.spec import MethodSpec
from workers.run_directory import sync
from workers.training.checkpoints.disk_errors import full_disk_reported
from workers.training.models.dropout import restore_dropout
from workers.training.models.score_head import align_tokenizer, score_layer_of


def save(
    model: Any, tokenizer: Any, target: Path, method: MethodSpec, base: str, revision: str | None = None
) -> tuple[str, ...]:
    """Writes the model, or only its adapters, completely or not at all. Returns the names of the files.

    Merging adapters changes `model` itself.

    Args:
        base: the base model's name, which adapters refer to.
        revision: its revision on the hub.
    """
    if method.lora is not None and method.lora.merge:
        model = model.merge_and_unload()
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    _restore_scaling(model.config)
    restore_dropout(model)
    if score_layer_of(model) is not None:
        align_tokenizer(tokenizer, model.config)
    try:
        with full_disk_reported():
            _write(model, tokenizer, partial, {"base_model_name_or_path": base, "revision": revision})
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # frees the space again if the disk is full
        raise
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    sync(target.parent)
    return tuple(sorted(file.name for file in target.iterdir()))


def _write(model: Any, tokenizer: Any, folder: Path, base: dict[str, str | None]) -> None:
    """Writes a model's files, and flushes them to disk.

    Args:
        base: the fields of an adapter's config that name its base model.
    """
    # peft would add the whole weights of an adapted head or embedding, which are the base model's.
    own = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    model.save_pretrained(folder, **own)
    # Several chat templates would be saved in a folder, and a result consists of plain files.
    tokenizer.save_pretrained(folder, save_jinja_files=not isinstance(tokenizer.chat_template, dict))
    if (adapters := folder / "adapter_config.json").exists():  # where peft has put a path of this machine
        adapters.write_text(json.dumps({**json.loads(adapters.read_text()), **base}, indent=2))
    (folder / "README.md").unlink(missing_ok=True)  # peft's, a template that is not filled in
    for path in (*folder.iterdir(), folder):
        sync(path)


_SCALING_OF_WEIGHTS = "rescale_every"
"""A field of RWKV's config: at inference, its model divides the weights of later layers by powers of two in
place, and multiplies them again when it is trained."""


def keep_weights(config: Any) -> None:
    """Keeps a model from changing its weights at inference, so that evaluations and checkpoints see those
    that were trained. `save` restores the field."""
    if getattr(config, _SCALING_OF_WEIGHTS, 0):
        config.accrue_rescale_every = config.rescale_every
        config.rescale_every = 0


def _restore_scaling(config: Any) -> None:
    if hasattr(config, "accrue_rescale_every"):
        config.rescale_every = config.accrue_rescale_every
        del config.accrue_rescale_every
