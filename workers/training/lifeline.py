"""A trainer does not outlive its supervisor, however that one ends."""

import contextlib
import os
import select
import threading

from workers.run_directory import LIFELINE_VARIABLE, SILENCE_VARIABLE
from workers.training import enclosure


def die_with_parent() -> None:
    """Ends this process with the supervisor that started it; does nothing when started by hand.

    The kernel's parent-death signal acts at once on Linux; the inherited pipe, whose other end dies
    with the supervisor, also ends what has other parents: the ranks below a launcher. Where the supervisor
    promises to be heard from on it, its silence ends this process as well.
    """
    descriptor = os.environ.get(LIFELINE_VARIABLE)
    if descriptor is None:
        return
    enclosure.die_with_parent()
    silence = os.environ.get(SILENCE_VARIABLE)
    patience = float(silence) if silence is not None else None
    threading.Thread(target=_watch, args=(int(descriptor), patience), daemon=True, name="lifeline").start()


def _watch(descriptor: int, patience: float | None) -> None:
    with contextlib.suppress(OSError):
        while select.select([descriptor], [], [], patience)[0] and os.read(descriptor, 4096):
            pass
    os._exit(1)
