"""Makes the data previews that the service has requested."""

import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import structlog
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import DBAPIError

from app import PACKAGE_PREFIX
from app.contract.preview import DatasetPreview, PreviewSpec
from app.contract.regular_files import create_regular, read_regular
from app.datasets import previews
from app.errors import Unavailable
from app.models import base_models
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database, is_unavailable
from app.storage.disk import remove_tree
from workers.orphaned_processes import children_of, wait_until_gone
from workers.run_directory import SECRET_FILES_VARIABLE
from workers.trainer_process import is_passed_on, secret_files
from workers.training.data.preview import preview
from workers.training.exceptions import CannotTrain
from workers.training.models.base_model import load_tokenizer, prepare_files
from workers.training.models.fetching import fetch, fetch_in_child
from workers.training.processes.filesystem_view import drop_capabilities, model_folder, restrict_view
from workers.training.processes.lifeline import die_with_parent
from workers.training.processes.limits import limit_memory
from workers.training.processes.process_tree import run_sandboxed

log = structlog.get_logger("accrue.profiler")

_SECONDS = 20.0
"""The time limit for one preview, which takes a fraction of a second on an idle machine."""

_ENDS_WITHIN_SECONDS = 10.0
"""The time in which the kernel must have ended all descendants of a killed child."""

_FOUND = "found.json"
_MAX_PREVIEW_BYTES = 2**23
"""The maximum size of a preview, in bytes."""
_CPU_SECONDS = 60
_MEMORY_BYTES = 2**31
"""The memory that making a preview may use, beyond what the process uses before."""


_served: dict[str | None, float] = {}
"""When each owner was served last."""


def answer_one(database: Database, settings: Settings) -> bool:
    """Makes the next requested preview. Returns False if there is no request."""
    with database.reading() as session:
        if not previews.has_unclaimed(session):
            return False
    with database.writing() as session:
        request = previews.claim(session, _served)
    if request is None:
        return False
    order = PreviewSpec.model_validate(request.order)
    made, error = _make_in_child(order, settings)
    try:
        with database.writing() as session:
            previews.store(session, request.id, made, error)
    except DBAPIError as failure:
        if is_unavailable(failure):
            raise
        log.exception("a preview cannot be stored", request=request.id)
        with database.writing() as session:
            previews.store(session, request.id, None, "the preview could not be stored")
    return True


def _make_in_child(order: PreviewSpec, settings: Settings) -> tuple[DatasetPreview | None, str | None]:
    """Makes a preview in a child process with limits. Returns the preview, or the reason why there is none.

    A tokenizer's files may make the process run forever, fill the memory or end, in native code that no
    exception and no signal handler can interrupt.
    """
    try:
        model = base_models.path_of(order.model, settings)
        data = stored_files.path_of_file(settings, order.data.file_id).resolve()
    except (ValueError, Unavailable) as error:
        return None, str(error)
    with _temporary_folder() as folder:
        hidden = settings.data_dir.resolve() if settings.trainer_isolation else None
        child = _children().Process(
            target=_child_main, args=(_make_preview, order, model, data, Path(folder), hidden), daemon=True
        )
        with _without_secrets():
            child.start()
        try:
            child.join(_SECONDS)
            if child.is_alive():
                return None, f"reading the data took longer than {_SECONDS:.0f} s"
            found = _found(Path(folder))
        finally:
            inner = children_of(child.pid) if child.pid is not None else []
            child.kill()
            child.join()
            wait_until_gone(inner, _ENDS_WITHIN_SECONDS)
    if found is None:
        log.warning("no preview: the process that was making it ended", model=order.model.name)
        return None, (
            f"the tokenizer of {order.model.name} could not be used: it takes too much memory, or "
            "its files "
            "are damaged"
        )
    return found.preview, found.error


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """A temporary folder that is deleted at the end, however deeply a child has nested folders in it."""
    folder = tempfile.mkdtemp(prefix="accrue-preview-")
    try:
        yield folder
    finally:
        remove_tree(Path(folder))


class _Found(BaseModel):
    """The child's result."""

    preview: DatasetPreview | None = None
    error: str | None = None


def _found(folder: Path) -> _Found | None:
    try:
        content = read_regular(folder, _FOUND, max_bytes=_MAX_PREVIEW_BYTES)
        return None if content is None else _Found.model_validate_json(content)
    except (OSError, ValidationError):
        return None


@cache
def _children() -> ForkServerContext:
    """A context whose children are forks of a server process that has imported everything but never held a
    database, a setting or a secret. They share neither this process's memory nor its open files."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{PACKAGE_PREFIX}workers.profiling.previews"])
    with _without_secrets():
        first = context.Process(target=_nothing)
        first.start()
    first.join()  # once the server has imported everything, which is not part of a preview's time limit
    return context


def _nothing() -> None:
    """A child that only waits until the server has started."""


@contextmanager
def _without_secrets() -> Iterator[None]:
    """Removes secrets from the environment of processes that are started within the block, and names the
    files with secrets, which are hidden from them."""
    named = secret_files()
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if not is_passed_on(name)}
    os.environ[SECRET_FILES_VARIABLE] = named
    try:
        yield
    finally:
        del os.environ[SECRET_FILES_VARIABLE]
        os.environ.update(hidden)


def _child_main(
    make: Callable[[PreviewSpec, str, Path, Path], DatasetPreview],
    order: PreviewSpec,
    model: str,
    data: Path,
    folder: Path,
    hidden: Path | None,
) -> None:
    """Runs in the child: writes a preview or an error into a folder.

    Args:
        make: makes the preview; the child imports it by its name.
        hidden: the data folder, in which the child may read only its file and its model; None for no
        isolation.
    """
    die_with_parent()
    os.closerange(
        3, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    )  # open pipes would keep the fork server alive
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # what a tokenizer prints may be training text
    for number in (1, 2):
        os.dup2(sys.stderr.fileno(), number)
    if hidden is None:
        _answer(make, order, model, data, folder)
        return
    fetch_in_child(lambda: _fetch(order, model))  # if files are still missing, the code below reports it

    def look(apart: bool) -> int:
        if apart:
            base = model_folder(order.model, model)
            restrict_view(hidden, {data: False, base: False, folder.resolve(): True})
        else:
            drop_capabilities()
        _answer(make, order, model, data, folder)
        return 0

    run_sandboxed(look, isolated=True)


def _fetch(order: PreviewSpec, model: str) -> int:
    with suppress(OSError, ValueError, ImportError):
        fetch(order.model, model)
    return 0


def _answer(
    make: Callable[[PreviewSpec, str, Path, Path], DatasetPreview],
    order: PreviewSpec,
    model: str,
    data: Path,
    folder: Path,
) -> None:
    """Makes the preview under limits, and writes it, or the error, into the folder."""
    limit_memory(_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))  # even if the parent stops waiting
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found = _Found(preview=make(order, model, data, folder))
    except CannotTrain as refused:
        found = _Found(error=str(refused))
    except (
        BaseException
    ) as unexpected:  # tokenizers' panics are BaseExceptions; their message may be training text
        what = type(unexpected).__name__
        found = _Found(
            error=f"the tokenizer of {order.model.name} could not be loaded or used ({what}): check that "
            "the worker has the model's files"
        )
    with create_regular(folder / _FOUND) as file:
        file.write(found.model_dump_json().encode())


def _preview(order: PreviewSpec, model: str, data: Path, folder: Path) -> DatasetPreview:
    tokenizer = load_tokenizer(prepare_files(order.model, model, folder / "base"))
    return preview(order, data, tokenizer)


_make_preview = _preview
