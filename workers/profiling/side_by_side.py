"""Runs work on several cores, in forks of this process, which share its loaded modules."""

import os
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all, in order; the first is worked on here, each of the others in a fork.

    For a process without threads that hold locks, such as the profiler; not for one that others share.

    Raises:
        Exception: what one of them raised.
    """
    children = [_fork(work) for work in works[1:]]
    results: list[T] = []
    try:
        results.append(works[0]())
    finally:
        told: list[tuple[T, Exception | None]] = [_end(*child) for child in children]
    for result, error in told:
        if error is not None:
            raise error
        results.append(result)
    return results


def _fork(work: Callable[[], T]) -> tuple[int, int]:
    """A child's process id, and the end of the pipe that it answers through."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    try:
        os.close(ours)
        answer: tuple[T | None, Exception | None]
        try:
            answer = (work(), None)
        except Exception as error:
            answer = (None, error)
        with os.fdopen(theirs, "wb") as pipe:
            pickle.dump(answer, pipe)
    finally:
        os._exit(0)  # no handler and no destructor of the parent's runs twice


def _end(child: int, ours: int) -> tuple[T, Exception | None]:
    with os.fdopen(ours, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    if not content:
        raise ChildProcessError("a fork of the profiler ended without an answer")
    answer: tuple[T, Exception | None] = pickle.loads(content)  # our own child's
    return answer
