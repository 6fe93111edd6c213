"""Looks at data sets, for those who wait for them."""

import multiprocessing
import os
import resource
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import structlog

from app.contract.preview import DatasetPreview, PreviewOrder
from app.datasets import previews
from app.models import base_models
from app.settings import Settings
from app.storage.database import Database
from workers.training.faults import CannotTrain
from workers.training.limits import limit_memory
from workers.training.model import load_tokenizer, prepare_files
from workers.training.preview import preview

log = structlog.get_logger("accrue.profiler")

_SECONDS = 20.0
"""For one look."""

_CPU_SECONDS = 60
_MEMORY_BYTES = 2**31
"""Of a look, beside what is there before it."""


def answer_one(database: Database, settings: Settings) -> bool:
    """Looks at what was asked for first; false where nobody waits."""
    with database.reading() as session:
        if not previews.waiting(session):
            return False
    with database.writing() as session:
        request = previews.claim(session)
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
    receiving, sending = fork.Pipe(duplex=False)
    child = fork.Process(target=_look, args=(order, settings, sending), daemon=True)
    child.start()
    sending.close()
    try:
        if not receiving.poll(_SECONDS):
            return None, f"reading the data took longer than {_SECONDS:.0f} s"
        made, error = receiving.recv()
    except EOFError:
        log.warning("no preview: the process that made it ended", model=order.model.name)
        return None, (
            f"the tokenizer of {order.model.name} could not be used: it takes too much memory, or its files "
            "are damaged"
        )
    finally:
        child.kill()
        child.join()
        receiving.close()
    return made, error


def _look(order: PreviewOrder, settings: Settings, found: Connection) -> None:
    """The child: sends a preview or an error."""
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # what a tokenizer prints may be training text
    os.dup2(sys.stderr.fileno(), 2)
    limit_memory(_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))  # also once nobody waits any more
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found.send((_preview(order, settings), None))
    except CannotTrain as refused:
        found.send((None, str(refused)))
    except BaseException as unexpected:  # tokenizers panic with one; its message may be training text
        what = type(unexpected).__name__
        found.send(
            (
                None,
                f"the tokenizer of {order.model.name} could not be loaded or used ({what}): look whether the "
                "worker has the model's files",
            )
        )


def _preview(order: PreviewOrder, settings: Settings) -> DatasetPreview:
    with tempfile.TemporaryDirectory(prefix="accrue-preview-") as folder:
        staged = prepare_files(order.model, base_models.path_of(order.model, settings), Path(folder) / "base")
        tokenizer = load_tokenizer(staged)
    return preview(order, settings.files_dir / order.data.file_id, tokenizer)
