"""Data sets of the hub by name. Their files are downloaded to the hub's cache and read like any others; code
that comes with a data set is never run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from app.contract.model_reference import split_revision
from app.datasets.containers import SUFFIXES, Reading
from app.datasets.content import DataFiles
from app.errors import Unprocessable
from app.settings import Settings

_FIELD = "dataset_config.dataset"
_TIMEOUT_SECONDS = 10.0
_MOST_FILES = 1000


def find(name: str, how: Reading, settings: Settings) -> DataFiles:
    """Downloads the training files of a data set, unless the hub's cache has them.

    Args:
        name: owner/name, or owner/name@revision.

    Raises:
        Unprocessable: the hub does not give it, it is too large, or it has no files that can be read; the
            message says what to do.
    """
    from huggingface_hub import HfApi, get_token, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # is documented

    disable_progress_bars()
    plain, revision = split_revision(name)
    token = get_token()
    with _explained(name):
        info = HfApi(token=token or False).dataset_info(
            plain, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
        )
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        chosen = _training_files(name, list(sizes))
        size = sum(sizes[each] for each in chosen)
        if size > settings.max_file_bytes:
            raise Unprocessable(
                f"The training files of {name} take {size} bytes, more than {settings.max_file_bytes} "
                "(ACCRUE_MAX_FILE_BYTES): download those that you need, and upload them.",
                field=_FIELD,
            )
        paths = [
            hf_hub_download(plain, each, repo_type="dataset", revision=info.sha, token=token or False)
            for each in chosen
        ]
    names = [PurePosixPath(each).name for each in chosen]
    return DataFiles(tuple(zip(map(Path, paths), names, strict=True)), how)


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
            f"The data set {name} has no file that can be read ({', '.join(SUFFIXES)}).", field=_FIELD
        )
    folders = sorted({str(PurePosixPath(each).parent) for each in chosen})
    if len(folders) > 1 or len(chosen) > _MOST_FILES:
        raise Unprocessable(
            f"The data set {name} has {len(chosen)} training files, in the folders "
            f"{', '.join(folders[:10])}: download those that you need, and upload them or put them into "
            "ACCRUE_DATASETS_DIR.",
            field=_FIELD,
        )
    return chosen


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns the hub's errors into answers.

    Raises:
        Unprocessable: the hub cannot be reached, or does not give the data set.
    """
    import httpx2 as httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    plain, revision = split_revision(name)
    page = f"{constants.ENDPOINT}/datasets/{plain}"
    try:
        yield
    except GatedRepoError:
        why = (
            f"is gated: accept its conditions at {page}, and set HF_TOKEN to a token of the account that "
            "accepted them"
        )
    except RevisionNotFoundError:
        why = f"has no revision {revision}: {page}/tree/main lists its branches"
    except RepositoryNotFoundError:
        why = (
            "was found neither on this machine nor on the hub; if it is private, set HF_TOKEN to a token "
            "that may read it"
        )
    except HFValidationError:
        why = "is not on this machine, and it is not a valid name on the hub"
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        why = f"could not be downloaded: the hub answers {status}"
    except (httpx.HTTPError, OSError):
        why = "is not on this machine, and the hub cannot be reached from here"
    else:
        return
    raise Unprocessable(f"The data set {name} {why}.", field=_FIELD)
