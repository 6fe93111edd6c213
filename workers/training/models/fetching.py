"""Downloads a base model's files in a separate process, before the trainer reads any of them.

Only that process has the hub's token and can write to the hub's cache. It ends before the trainer drops its
privileges.
"""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.contract.assignment import Assignment
from app.contract.model_fingerprint import TEMPLATES
from app.contract.model_reference import ModelReference
from workers.run_directory import INTERRUPTED, TOKEN_VARIABLE
from workers.training.models.hub_limits import DownloadLimits
from workers.training.models.loading_errors import reason_of
from workers.training.processes.process_tree import end_as, in_a_child

_FETCHED = "ACCRUE_MODEL_FETCHED"
"""Set once the files are fetched: from then on, nothing is downloaded."""

_WANTED = ["*.json", "*.safetensors", "merges.txt", "tokenizer.model", "chat_template.jinja",
           f"{TEMPLATES}/*.jinja"]  # fmt: skip
_OTHER = ["*/*.json", "*/*.safetensors", "consolidated*"]
"""Files with the same weights in the publisher's own format."""


def fetch_in_child(fetch: Callable[[], int]) -> int:
    """Fetches in a child process; from then on, this process and its children use only local files. If a
    signal other than an interruption ends the child, it ends this process, too.

    Returns:
        0, or the exit status of the failed attempt.
    """
    status = in_a_child(fetch)
    os.environ[_FETCHED] = "1"
    token = os.environ.pop(TOKEN_VARIABLE, None)
    if token is not None:
        os.close(int(token))
    if status in (-signal.SIGTERM, -signal.SIGINT):
        return INTERRUPTED
    end_as(status)
    return status


def fetch(model: ModelReference, path: str) -> Path:
    """The folder with a model's files: a hub model is downloaded, the built-in one is made.

    Args:
        path: a folder, or a name on the hub.

    Raises:
        OSError, ValueError: the model cannot be fetched.
    """
    token = _hub_token()
    is_fetched = _FETCHED in os.environ
    if model.source == "built_in" and not is_fetched:
        from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2

        ensure_tiny_gpt2(Path(path))
    if model.source != "hub":
        return Path(path)
    os.environ["HF_HUB_DISABLE_XET"] = "1"  # which would send the token to an address that an answer names
    if model.revision is not None and not _REVISION.fullmatch(model.revision):
        raise ValueError("the model's revision has characters that no branch, tag or commit can have")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # is documented

    disable_progress_bars()
    _check_names()
    DownloadLimits(constants.ENDPOINT, model.architecture.parameters).apply()
    try:
        return Path(
            snapshot_download(
                path,
                revision=model.revision,
                allow_patterns=_WANTED,
                ignore_patterns=_OTHER,
                token=token,
                local_files_only=is_fetched,
            )
        )
    finally:
        os.environ.pop("HF_TOKEN", None)


def _check_names() -> None:
    """Makes huggingface_hub check the commits and entity tags in the hub's answers: it uses them as file
    names in its cache, and a hostile hub or mirror could send paths."""
    from huggingface_hub import HfApi, constants, file_download

    constants.HF_HUB_DISABLE_XET = True
    ask, describe = file_download.get_hf_file_metadata, HfApi.repo_info
    if ask.__module__ == __name__:
        return

    def asked(*arguments: Any, **options: Any) -> Any:
        try:
            found = ask(*arguments, **options)
        except Exception as error:
            answer = getattr(error, "response", None)
            _check_commit(answer.headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT) if answer else None)
            raise
        _check_commit(found.commit_hash)
        if found.etag is not None and not _TAG.fullmatch(found.etag):
            raise ValueError("the hub's answer names a file in a way that is not allowed")
        return found

    def described(*arguments: Any, **options: Any) -> Any:
        found = describe(*arguments, **options)
        _check_commit(found.sha)
        return found

    file_download.get_hf_file_metadata = asked
    HfApi.repo_info = described  # type: ignore[method-assign]


def _check_commit(commit: str | None) -> None:
    """Checks that what the hub calls a commit is one.

    Raises:
        ValueError: it is something else, such as a path.
    """
    if commit is not None and not _COMMIT.fullmatch(commit):
        raise ValueError("the hub's answer names a commit in a way that is not allowed")


_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


def is_transient(error: Exception) -> bool:
    """Whether a failed download may succeed later: the hub could not be reached, or failed itself."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, HfHubHTTPError):
        return error.response is None or error.response.status_code in _TRANSIENT
    if isinstance(error, LocalEntryNotFoundError):
        return not constants.HF_HUB_OFFLINE
    return type(error).__module__.startswith(("httpx", "httpcore")) or isinstance(error, ConnectionError)


_TRANSIENT = {408, 425, 429, *range(500, 600)}
"""Statuses of the hub's answers after which a later request may succeed."""


def why_not_loaded(error: Exception, assignment: Assignment, folder: Path) -> str:
    """What `reason_of` says of an error, with the model's name in place of paths."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        config = None
    paths = (str(folder), assignment.model_path)
    return reason_of(error, config, dict.fromkeys(paths, assignment.spec.model.name))


def _hub_token() -> str | None:
    """The token from the supervisor, read once; if None (run by hand), huggingface_hub looks for one
    itself."""
    descriptor = os.environ.pop(TOKEN_VARIABLE, None)
    if descriptor is None:
        return None
    with os.fdopen(int(descriptor), "rb") as pipe:
        return pipe.read().decode() or None
