"""Trainers as copies of a process that has loaded their libraries: loading them takes seconds, a copy takes
milliseconds and shares their memory.

If the libraries are not loaded, or this process has a GPU open, a copy loads the libraries itself: what CUDA
keeps in a process does not work in a copy of it.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from app.contract.base import Frozen
from workers.run_directory import RunDirectory
from workers.training.processes.module_loading import fewer_collections

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LIBRARIES = {"torch", "transformers"}
_SET_NAME, _LONGEST_NAME = 15, 15
"""An option of prctl(2), and the number of bytes that it takes."""


def preload() -> None:
    """Loads the libraries that every trainer needs, and builds the schemas of what it reads and writes."""
    with fewer_collections():
        from transformers import PreTrainedModel  # noqa: F401  # what the module of every model loads

        import workers.training.attempt
        import workers.training.distributed.group
        import workers.training.fit  # noqa: F401

        Frozen.build_all()


def command(run: Path) -> list[str]:
    """The command of a trainer that loads its libraries itself."""
    return [sys.executable, "-m", f"{PACKAGE_PREFIX}workers.training", str(run)]


@contextmanager
def forking() -> Iterator[None]:
    """Holds back signals while this process is copied: a copy gets them once it can handle them, in
    `become_trainer`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with warnings.catch_warnings():
            # Threads of libraries (OpenBLAS, jemalloc) are prepared for a copy of their process.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_trainer(run: Path, environment: Mapping[str, str], name: str = "trainer") -> NoReturn:
    """Turns this process, a copy that was made while `forking`, into a trainer with an environment of its
    own, as if `command` had started it.

    Args:
        name: what the process is called in the process table.
    """
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(PACKAGES_FOLDER)
    if not sys.modules.keys() >= _LIBRARIES or _has_opened_a_gpu():
        os.execve(sys.executable, command(run), dict(environment))
    _set_name(name)
    from workers.training.attempt import train

    sys.argv = command(run)[2:]
    status = 1
    try:
        status = train(RunDirectory(run))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        ignore_signals()
        logging.shutdown()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def ignore_signals() -> None:
    """Lets no later signal replace the exit status: while Python finalises, SIGTERM would end the process.

    An engine that takes a node away signals every process, more than once.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _set_name(name: str) -> None:
    """Names this process as `top` and `ps -o comm` show it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NAME, name.encode()[:_LONGEST_NAME], 0, 0, 0)


def _has_opened_a_gpu() -> bool:
    """Whether this process has an open file of a GPU's driver, as after any call of CUDA."""
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            if str(entry.readlink()).startswith(("/dev/nvidia", "/dev/dxg")):
                return True
        except OSError:
            continue  # the descriptor with which the folder was read
    return False
