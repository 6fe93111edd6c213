"""The next micro-batch is made ready while the device works on this one."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TypeVar

Item = TypeVar("Item")
Ready = TypeVar("Ready")


def prefetched(executor: Executor, make: Callable[[Item], Ready], items: Sequence[Item]) -> Iterator[Ready]:
    """`make` of each item in order, one ahead of the caller, on the executor's thread.

    An error of `make` is raised where its item would have come.
    """
    coming = executor.submit(make, items[0]) if items else None
    for item in items[1:]:
        assert coming is not None
        ready, coming = coming, executor.submit(make, item)
        yield ready.result()
    if coming is not None:
        yield coming.result()
