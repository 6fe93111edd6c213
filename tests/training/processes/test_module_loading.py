"""Modules load with fewer garbage collections, and collections afterwards are as before."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from workers.training.processes.module_loading import fewer_collections

OBJECTS = 20_000


@pytest.fixture(autouse=True)
def nothing_stays_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def collections_while_making_objects() -> int:
    starts = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            starts.append(info)

    gc.collect()  # so that the count to the next collection begins at zero
    gc.callbacks.append(note)
    try:
        made: list[list[int]] = [[number] for number in range(OBJECTS)]
    finally:
        gc.callbacks.remove(note)
    assert len(made) == OBJECTS
    return len(starts)


def test_few_collections_while_modules_load_and_as_many_as_before_afterwards() -> None:
    before = collections_while_making_objects()
    with fewer_collections():
        assert collections_while_making_objects() == 0
    assert before > 0
    assert collections_while_making_objects() == before


def test_what_was_loaded_is_ignored_by_later_collections() -> None:
    frozen = gc.get_freeze_count()
    with fewer_collections():
        loaded = [[number] for number in range(OBJECTS)]
    assert gc.get_freeze_count() - frozen >= OBJECTS
    assert not any(each is loaded for each in gc.get_objects())


def test_a_module_that_cannot_be_loaded_changes_nothing() -> None:
    thresholds = gc.get_threshold()
    with pytest.raises(ImportError), fewer_collections():
        raise ImportError
    assert gc.get_threshold() == thresholds
