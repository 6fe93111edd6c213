"""Looks at data sets, for those who wait for them."""

import multiprocessing
import os
import resource
import sys
import tempfile
from pathlib import Path

import structlog
from pydantic import BaseModel, ValidationError

from app.contract.plain_files import create_plain, read_plain
from app.contract.preview import DatasetPreview, PreviewOrder
from app.datasets import previews
from app.models import base_models
from app.settings import Settings
from app.storage.database import Database
from workers.training.faults import CannotTrain
from workers.training.isolation import code_and_caches, see_only
from workers.training.limits import limit_memory
from workers.training.model import load_tokenizer, prepare_files
from workers.training.preview import preview

log = structlog.get_logger("accrue.profiler")

_SECONDS = 20.0
"""For one look."""

_FOUND = "found.json"
_CPU_SECONDS = 60
_MEMORY_BYTES = 2**31
"""Of a look, beside what is there before it."""


_served: dict[str | None, float] = {}
"""When each owner was served last."""


def answer_one(database: Database, settings: Settings) -> bool:
    """Looks at what was asked for first; false where nobody waits."""
    with database.reading() as session:
        if not previews.waiting(session):
            return False
    with database.writing() as session:
        request = previews.claim(session, _served)
    if request is None:
        return False
    order = PreviewOrder.model_validate(request.order)
    made, error = _looked_at(order, settings)
    with database.writing() as session:
        previews.store(session, request.id, made, error)
    return True


def _looked_at(order: PreviewOrder, settings: Settings) -> tuple[DatasetPreview | None, str | None]:
    """What there is to see, or why there is nothing: found out by a child with limits.

    A tokenizer's files may keep it busy for ever, fill the memory, or end the process, in native code that
    no exception and no signal handler reaches.
    """
    fork = multiprocessing.get_context("fork")  # the child has everything imported
    with tempfile.TemporaryDirectory(prefix="accrue-preview-") as folder:
        child = fork.Process(target=_look, args=(order, settings, Path(folder)), daemon=True)
        child.start()
        try:
            child.join(_SECONDS)
            if child.is_alive():
                return None, f"reading the data took longer than {_SECONDS:.0f} s"
            found = _found(Path(folder))
        finally:
            child.kill()
            child.join()
    if found is None:
        log.warning("no preview: the process that made it ended", model=order.model.name)
        return None, (
            f"the tokenizer of {order.model.name} could not be used: it takes too much memory, or its files "
            "are damaged"
        )
    return found.preview, found.error


class _Found(BaseModel):
    """What the child writes."""

    preview: DatasetPreview | None = None
    error: str | None = None


def _found(folder: Path) -> _Found | None:
    try:
        content = read_plain(folder, _FOUND)
        return None if content is None else _Found.model_validate_json(content)
    except (OSError, ValidationError):
        return None


def _look(order: PreviewOrder, settings: Settings, folder: Path) -> None:
    """The child: leaves a preview or an error in a folder."""
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # what a tokenizer prints may be training text
    os.dup2(sys.stderr.fileno(), 2)
    os.environ.pop("ACCRUE_DATABASE_URL", None)
    model = Path(base_models.path_of(order.model, settings))
    data = settings.files_dir / order.data.file_id
    if settings.trainer_isolation:
        needed = {data.resolve(): False, folder.resolve(): True, **dict(code_and_caches())}
        needed |= (
            {model.resolve(): False} if model.exists() else {settings.data_dir.resolve() / "models": True}
        )
        see_only(settings.data_dir.resolve(), needed)
    limit_memory(_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))  # also once nobody waits any more
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found = _Found(preview=_preview(order, str(model), data, folder))
    except CannotTrain as refused:
        found = _Found(error=str(refused))
    except BaseException as unexpected:  # tokenizers panic with one; its message may be training text
        what = type(unexpected).__name__
        found = _Found(
            error=f"the tokenizer of {order.model.name} could not be loaded or used ({what}): look whether "
            "the worker has the model's files"
        )
    with create_plain(folder / _FOUND) as file:
        file.write(found.model_dump_json().encode())


def _preview(order: PreviewOrder, model: str, data: Path, folder: Path) -> DatasetPreview:
    tokenizer = load_tokenizer(prepare_files(order.model, model, folder / "base"))
    return preview(order, data, tokenizer)
