"""Looks at data sets, for those who wait for them."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import structlog

from app import base_models
from app.data import previews
from app.database import Database
from app.schemas.preview import DatasetPreview, PreviewOrder
from app.settings import Settings
from workers.training.faults import CannotTrain
from workers.training.model import load_tokenizer, prepare_files
from workers.training.preview import preview

log = structlog.get_logger("accrue.profiler")

_SECONDS = 20.0
"""A chat template is a program, and may have no end."""


class _TooLong(Exception):
    pass


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
    made, error = None, None
    try:
        with _within(_SECONDS):
            made = _look(order, settings)
    except CannotTrain as refused:
        error = str(refused)
    except _TooLong:
        error = f"reading the data took longer than {_SECONDS:.0f} s"
    except Exception as unexpected:  # a tokenizer's files may be anything; the error may hold training text
        log.warning("no preview", model=order.model.name, error=type(unexpected).__name__)
        error = (
            f"the tokenizer of {order.model.name} could not be loaded or used "
            f"({type(unexpected).__name__}): look whether the worker has the model's files"
        )
    with database.writing() as session:
        previews.store(session, request.id, made, error)
    return True


def _look(order: PreviewOrder, settings: Settings) -> DatasetPreview:
    with tempfile.TemporaryDirectory(prefix="accrue-preview-") as folder:
        staged = prepare_files(order.model, base_models.path_of(order.model, settings), Path(folder) / "base")
        tokenizer = load_tokenizer(staged)
    return preview(order, settings.files_dir / order.data.file_id, tokenizer)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises:
    _TooLong: the block is not done by then.
    """

    def over(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
