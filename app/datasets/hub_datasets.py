"""Datasets of the hub by name. Their files are downloaded for one request and read like any others; code
that comes with a dataset is never run."""

import json
import time
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from app.contract.model_reference import split_revision
from app.datasets.content import DataFiles, DownloadFolder
from app.datasets.file_types import SUFFIXES, ReadOptions
from app.errors import Unprocessable
from app.hub import client
from app.settings import Settings

_FIELD = "dataset_config.dataset"
_LISTING_SECONDS, _DOWNLOAD_SECONDS = 10.0, 1800.0
_LISTING_BYTES = 8 * 2**20
_MOST_FILES = 1000
_LONGEST_NAME, _SHOWN = 1000, 100


def _plain(name: str) -> str:
    """The name of a file that can be requested.

    Raises:
        ValueError: it has characters or parts that no file of a dataset has.
    """
    name.encode()
    if len(name) > _LONGEST_NAME or not name.isprintable() or ".." in name.split("/") or name.startswith("/"):
        raise ValueError
    return name


class _File(BaseModel):
    rfilename: Annotated[str, AfterValidator(_plain)]
    size: int | None = None


class _Listing(BaseModel):
    """What the hub says about a dataset."""

    sha: str = Field(pattern=r"^[0-9a-f]{40}$")
    siblings: list[_File] = Field(default_factory=list)


def find(name: str, how: ReadOptions, settings: Settings) -> DataFiles:
    """Downloads the training files of a dataset. They are deleted once the result is no longer used.

    Args:
        name: owner/name, or owner/name@revision.

    Raises:
        Unprocessable: the hub does not provide it, it is too large, or it has no files that can be read; the
            message says what to do.
    """
    from huggingface_hub import get_token

    token = get_token()
    listing = _listing(name, token)
    sizes = {each.rfilename: each.size or 0 for each in listing.siblings}
    chosen = _training_files(name, list(sizes))
    if sum(sizes[each] for each in chosen) > settings.max_file_bytes:
        raise _too_large(name, settings)
    folder = DownloadFolder(settings)
    try:
        sources = _downloaded(name, listing.sha, chosen, folder, token, settings)
    except BaseException:
        folder.delete()
        raise
    return DataFiles(sources, how, folder)


def _downloaded(
    name: str, commit: str, files: list[str], folder: DownloadFolder, token: str | None, settings: Settings
) -> tuple[tuple[Path, str], ...]:
    """Downloads files, which get names of their own. Returns their paths and the names that they had."""
    from huggingface_hub import hf_hub_url

    left, sources, ends = settings.max_file_bytes, [], time.monotonic() + _DOWNLOAD_SECONDS
    for number, each in enumerate(files):
        path = folder.path / f"{number}{PurePosixPath(each).suffix.lower()}"
        url = hf_hub_url(split_revision(name)[0], each, repo_type="dataset", revision=commit)
        try:
            seconds = max(0.0, ends - time.monotonic())
            answer = client.download(url, token, path, most_bytes=left, seconds=seconds)
        except client.HubNotAnswered as error:
            raise _refused(name, f"could not be downloaded: the hub {error}") from None
        if answer.status != HTTPStatus.OK:
            raise _refused(name, _why(name, answer))
        left -= path.stat().st_size
        if left < 0:
            raise _too_large(name, settings)
        sources.append((path, PurePosixPath(each).name))
    return tuple(sources)


def _listing(name: str, token: str | None) -> _Listing:
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # is documented

    plain, revision = split_revision(name)
    try:
        validate_repo_id(plain)
    except HFValidationError:
        raise _refused(name, "is not on this machine, and it is not a valid name on the hub") from None
    url = f"{constants.ENDPOINT}/api/datasets/{plain}"
    if revision is not None:
        url += f"/revision/{quote(revision, safe='')}"
    try:
        answer = client.get(f"{url}?blobs=true", token, most_bytes=_LISTING_BYTES, seconds=_LISTING_SECONDS)
    except client.HubNotAnswered as error:
        raise _refused(name, f"is not on this machine, and the hub {error}") from None
    if answer.status != HTTPStatus.OK:
        raise _refused(name, _why(name, answer))
    try:
        return _Listing.model_validate(json.loads(answer.content))
    except (ValidationError, ValueError, RecursionError):
        raise _refused(name, "could not be downloaded: the hub's list of its files cannot be read") from None


def _too_large(name: str, settings: Settings) -> Unprocessable:
    return _refused(
        name,
        f"has more than {settings.max_file_bytes} bytes of training files (ACCRUE_MAX_FILE_BYTES): download "
        "those that you need, and upload them",
    )


def _refused(name: str, why: str) -> Unprocessable:
    return Unprocessable(f"The dataset {name} {why}.", field=_FIELD)


def _training_files(name: str, files: list[str]) -> list[str]:
    """The files to train on: those with `train` in their names or folders, or else all.

    Raises:
        Unprocessable: there are none, too many, or those of several subsets.
    """
    kind_of = {each: PurePosixPath(each).suffix.lower() for each in sorted(files)}
    named = [each for each in kind_of if not PurePosixPath(each).name.startswith((".", "README"))]
    readable = [each for each in named if kind_of[each] in SUFFIXES]
    tables = [each for each in readable if kind_of[each] not in (".txt", ".md")]
    readable = tables or readable  # beside tables, texts are about the data
    chosen = [each for each in readable if "train" in each.lower()] or readable
    if not chosen:
        raise Unprocessable(
            f"The dataset {name} has no file that can be read ({', '.join(SUFFIXES)}).", field=_FIELD
        )
    folders = sorted({str(PurePosixPath(each).parent) for each in chosen})
    if len(folders) > 1 or len(chosen) > _MOST_FILES:
        some = ", ".join(folder[:_SHOWN] for folder in folders[:10])
        raise Unprocessable(
            f"The dataset {name} has {len(chosen)} training files, in the folders {some}: download "
            "those that you need, and upload them or put them into ACCRUE_DATASETS_DIR.",
            field=_FIELD,
        )
    return chosen


def _why(name: str, answer: client.HubResponse) -> str:
    """What the hub's refusal means, by its status and its X-Error-Code."""
    from huggingface_hub import constants

    plain, revision = split_revision(name)
    page, code = f"{constants.ENDPOINT}/datasets/{plain}", answer.headers.get("x-error-code")
    if code == "GatedRepo":
        return (
            f"is gated: accept its conditions at {page}, and set HF_TOKEN to a token of the account that "
            "accepted them"
        )
    if code == "RevisionNotFound":
        return f"has no revision {revision or 'main'}: {page}/tree/main lists its branches"
    if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
        return (
            "was found neither on this machine nor on the hub; if it is private, set HF_TOKEN to a token "
            "that may read it"
        )
    return f"could not be downloaded: the hub answers {answer.status}"
