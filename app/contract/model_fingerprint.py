"""The fingerprint of a model's files: a digest of their names, sizes and contents (of a file above 64 MiB:
evenly spaced blocks).

The service stores it with a job, and the trainer checks it, so that a job trains the model that it was
submitted with. Uses only the standard library.
"""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

WHOLE_BYTES = 64 * 2**20
"""Files up to this size are hashed whole. Of larger files, evenly spaced blocks are hashed, including the
first and the last: reading tens of gigabytes at each submission would take longer than planning."""

_BLOCKS, _BLOCK_BYTES = 256, 2**16

_NAMES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt",
    "added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json",
)  # fmt: skip


TEMPLATES = "additional_chat_templates"
"""The folder in which transformers keeps further chat templates of a model, such as the one for tools."""


def fingerprint_of_files(folder: Path) -> str:
    """SHA-256 over the names, sizes and contents of the files that training reads; of large files, over some
    blocks of the contents.

    Raises:
        OSError: one of them cannot be read.
    """
    found = [folder / name for name in _NAMES if (folder / name).is_file()]
    found += sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    found += sorted(path for path in (folder / TEMPLATES).glob("*.jinja") if path.is_file())
    digest = hashlib.sha256()
    for path in found:
        stat = path.stat()
        own = _digest(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        digest.update(os.fsencode(path.name) + f" {stat.st_size} {own}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def _digest(path: str, size: int, modified_ns: int, inode: int) -> str:
    """The digest of a file, or of blocks of a large one; the last two arguments only invalidate the cache."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        if size <= WHOLE_BYTES:
            while block := file.read(2**20):
                digest.update(block)
        else:
            for number in range(_BLOCKS):
                file.seek(number * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
