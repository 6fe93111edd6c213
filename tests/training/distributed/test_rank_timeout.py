"""A rank does not wait for ever for one that hangs."""

import threading
import time

import pytest

from workers.training.distributed import rank_timeout
from workers.training.distributed.rank_timeout import RankTimeout, WindowSize

SIZE = WindowSize(4, 1000, 100_000)


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    monkeypatch.setattr(rank_timeout, "_LEAST_SECONDS", 0.1)
    monkeypatch.setattr(rank_timeout, "_POLL_SECONDS", 0.01)
    return threading.Event()


def test_it_gives_up_after_many_windows_of_waiting(given_up: threading.Event) -> None:
    limited = RankTimeout(lambda _: given_up.set())
    limited.note_window(0.001, SIZE)
    with limited.limited_waiting(SIZE), limited.waiting():
        assert given_up.wait(10)


def test_it_waits_for_ever_while_no_window_s_length_is_known(given_up: threading.Event) -> None:
    limited = RankTimeout(lambda _: given_up.set())
    with limited.limited_waiting(SIZE), limited.waiting():
        time.sleep(0.3)
    assert not given_up.is_set()


def test_it_waits_for_ever_between_windows(given_up: threading.Event) -> None:
    limited = RankTimeout(lambda _: given_up.set())
    limited.note_window(0.001, SIZE)
    with limited.limited_waiting(SIZE):
        pass
    with limited.waiting():
        time.sleep(0.3)
    assert not given_up.is_set()


def test_short_waits_do_not_add_up(given_up: threading.Event) -> None:
    limited = RankTimeout(lambda _: given_up.set())
    limited.note_window(0.04, SIZE)
    with limited.limited_waiting(SIZE):
        for _ in range(20):
            with limited.waiting():
                time.sleep(0.05)
    assert not given_up.is_set()


@pytest.mark.parametrize(
    "size",
    [WindowSize(400, 1000, 100_000), WindowSize(4, 100_000, 100_000), WindowSize(4, 1000, 10_000_000)],
    ids=["more micro-batches", "more tokens", "a longer sample"],
)  # fmt: skip
def test_it_waits_longer_for_a_larger_window(given_up: threading.Event, size: WindowSize) -> None:
    limited = RankTimeout(lambda _: given_up.set())
    limited.note_window(0.001, SIZE)
    with limited.limited_waiting(size), limited.waiting():
        time.sleep(0.3)
    assert not given_up.is_set()
