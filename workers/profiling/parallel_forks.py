"""Runs work on several cores, in forks of this process, which share its loaded modules."""

import os
import pickle
import resource
import signal
from collections.abc import Callable, Sequence
from typing import TypeVar

from workers.training.processes.lifeline import die_with_parent

T = TypeVar("T")

_CPU_SECONDS = 60
"""The processor time of a fork; longer than the profiler waits for one."""


def run_in_forks(works: Sequence[Callable[[], T]]) -> list[T]:
    """Runs the first function here and each other one in a fork. Returns their results in order.

    Use this only in a dedicated process whose threads hold no locks, such as the profiler.

    Raises:
        Exception: what one of them raised.
    """
    children = [_fork(work) for work in works[1:]]
    results: list[T] = []
    ended: list[tuple[T, Exception | None]] = []
    try:
        results.append(works[0]())
        ended = [_end(*child) for child in children]
    finally:
        for child, ours in children[len(ended) :]:  # after an error, or out of time
            os.kill(child, signal.SIGKILL)
            os.close(ours)
            os.waitpid(child, 0)
    for result, error in ended:
        if error is not None:
            raise error
        results.append(result)
    return results


def _fork(work: Callable[[], T]) -> tuple[int, int]:
    """Starts a child. Returns its process id and the read end of the pipe for its result."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    try:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        os.close(ours)
        answer: tuple[T | None, Exception | None]
        try:
            answer = (work(), None)
        except Exception as error:
            answer = (None, error)
        with os.fdopen(theirs, "wb") as pipe:
            pickle.dump(answer, pipe)
    finally:
        os._exit(0)  # the parent's exit handlers and destructors must not run here


def _end(child: int, ours: int) -> tuple[T, Exception | None]:
    with os.fdopen(ours, "rb", closefd=False) as pipe:
        content = pipe.read()
    os.close(ours)
    os.waitpid(child, 0)
    if not content:
        raise ChildProcessError("a fork of the profiler ended without an answer")
    answer: tuple[T, Exception | None] = pickle.loads(content)  # our own child's
    return answer
