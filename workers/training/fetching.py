"""Downloads a base model's files in a separate process, before the trainer reads any of them.

Only that process has the hub's token and can write to the hub's cache. It ends before the trainer drops its
privileges.
"""

import os
from collections.abc import Callable
from pathlib import Path

from app.contract.architecture import ModelReference
from app.contract.assignment import Assignment
from workers.run_directory import INTERRUPTED, TOKEN_VARIABLE
from workers.training.enclosure import in_a_child

_FETCHED = "ACCRUE_MODEL_FETCHED"
"""Set where the files are there already: nothing is downloaded any more."""

_WANTED = ["*.json", "*.safetensors", "merges.txt", "tokenizer.model", "chat_template.jinja"]
_OTHER = ["*/*", "consolidated*"]
"""Files with the same weights in the format of the model's makers."""


def fetched_first(fetch: Callable[[], int]) -> int:
    """Fetches in a child process; from then on this process and its children look at what is there alone.

    Returns:
        0, or the exit status that says why not.
    """
    status = in_a_child(fetch)
    os.environ[_FETCHED] = "1"
    token = os.environ.pop(TOKEN_VARIABLE, None)
    if token is not None:
        os.close(int(token))
    return status if status >= 0 else INTERRUPTED


def fetch(model: ModelReference, path: str) -> Path:
    """The folder with a model's files: a hub model is downloaded, the built-in one is made.

    Args:
        path: a folder, or a name on the hub.

    Raises:
        OSError, ValueError: it cannot be had.
    """
    token = _hub_token()
    is_fetched = _FETCHED in os.environ
    if model.source == "built_in" and not is_fetched:
        from workers.training.tiny_gpt2 import ensure_tiny_gpt2

        ensure_tiny_gpt2(Path(path))
    if model.source != "hub":
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # is documented

    disable_progress_bars()
    try:
        return Path(
            snapshot_download(
                path, allow_patterns=_WANTED, ignore_patterns=_OTHER, token=token, local_files_only=is_fetched
            )
        )
    finally:
        os.environ.pop("HF_TOKEN", None)


def first_line(error: Exception, assignment: Assignment, folder: Path) -> str:
    """What an error says, with the model's name in the place of paths."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    for path in (str(folder), assignment.model_path):
        first = first.replace(path, assignment.spec.model.name)
    return first[:500]


def _hub_token() -> str | None:
    """The token that the supervisor passed on, read once; None: the hub's own rules hold (run by hand)."""
    descriptor = os.environ.pop(TOKEN_VARIABLE, None)
    if descriptor is None:
        return None
    with os.fdopen(int(descriptor), "rb") as pipe:
        return pipe.read().decode() or None
