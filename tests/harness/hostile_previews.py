"""Hostile preview functions, as a malicious tokenizer could run them in the preview's process."""

import os
from contextlib import suppress
from pathlib import Path

from app.contract.preview import DatasetPreview, PreviewSpec


class Panic(BaseException):
    """A panic, as native code raises it."""


def endless(order: PreviewSpec, model: str, data: Path, folder: Path) -> DatasetPreview:
    while True:
        pass


def exits(order: PreviewSpec, model: str, data: Path, folder: Path) -> DatasetPreview:
    os._exit(1)


def takes_memory(order: PreviewSpec, model: str, data: Path, folder: Path) -> DatasetPreview:
    _ = bytearray(2**40)
    raise AssertionError


def panics(order: PreviewSpec, model: str, data: Path, folder: Path) -> DatasetPreview:
    raise Panic("training text")


def collects_secrets(order: PreviewSpec, model: str, data: Path, folder: Path) -> DatasetPreview:
    """Raises an error that lists what it could reach: open files, and secrets in the worker's environment."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself is closed
            target = str(descriptor.readlink())
            found += [target] if "accrue.db" in target else []
    environment = Path("/proc/self/environ").read_bytes()
    found += [name for name in ("ACCRUE_DATABASE_URL", "HF_TOKEN") if name.encode() in environment]
    found += [name for name in ("ACCRUE_DATABASE_URL", "HF_TOKEN") if name in os.environ]
    found += [str(path) for path in data.parent.parent.glob("accrue.db*")]
    raise type(f"Found{len(found)}", (Exception,), {})(found)
