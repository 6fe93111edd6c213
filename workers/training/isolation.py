"""A trainer's own view of the machine: of the data folder it sees its own run and its own data alone.

A model's files and training data come from strangers, and some library that reads them may one day be talked
into opening another file. What a trainer cannot see it cannot put into the model that it trains. Where the
machine does not let a process change its view (no Linux, a container without namespaces), it stays as it is.
"""

import ctypes
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from app import FOLDER
from app.contract.order import Order
from workers.run_directory import HIDDEN_VARIABLE

log = logging.getLogger("accrue.trainer")

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _NO_SUID, _NO_DEV, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
"""Of unshare(2), mount(2) and umount2(2)."""


def isolate(run: Path, order: Order) -> bool:
    """Hides the data folder that the supervisor names but for this run, and what the environments of our
    ancestors hold. Call it before there is a second thread.

    Returns:
        Whether anything is hidden now.
    """
    named = os.environ.get(HIDDEN_VARIABLE)
    if not named or sys.platform != "linux":
        return False
    hidden, run = Path(named).resolve(), run.resolve()
    needed = sorted({path.resolve() for path in _needed(run, order)})
    if hidden not in run.parents or hidden in needed:
        return False
    try:
        _own_view()
        _hide(hidden, [path for path in needed if hidden in path.parents and path.exists()])
        for environment in _environments_of_ancestors():
            with suppress(OSError):
                _mount("/dev/null", environment, None, _BIND)
    except OSError as error:
        log.info("the trainer sees the whole data folder: %s", error.strerror)
        return False
    return True


def _hide(hidden: Path, needed: list[Path]) -> None:
    """Puts an empty folder in the place of another, with what is needed of that.

    Raises:
        OSError: it could not be done; everything is as it was.
    """
    with ExitStack() as opened:
        kept: list[tuple[Path, int, bool]] = []
        for path in needed:  # in our own view: what was opened in another cannot be put into it
            descriptor = os.open(path, os.O_PATH)
            opened.callback(os.close, descriptor)
            kept.append((path, descriptor, path.is_dir()))
        _mount("tmpfs", hidden, "tmpfs", _NO_SUID | _NO_DEV)
        try:
            for path, descriptor, is_folder in kept:
                _put_back(path, descriptor, is_folder=is_folder)
        except OSError:
            _libc().umount2(os.fsencode(hidden), _DETACH)
            raise


def _needed(run: Path, order: Order) -> Iterator[Path]:
    yield run
    yield from (Path(name) for name in (order.data_file, order.validation_file) if name is not None)
    model = Path(order.model_path)
    if model.is_absolute():  # else the hub's; the built-in one is made there, for all jobs
        yield next(each for each in (model, *model.parents) if each.exists())
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE"):
        if variable in os.environ:
            yield Path(os.environ[variable])
    yield from (Path.home() / ".cache", Path(tempfile.gettempdir()))
    yield from (FOLDER, Path(sys.prefix), Path(sys.base_prefix))  # should somebody keep the code there
    yield from (Path(entry) for entry in sys.path if entry)


def _put_back(path: Path, descriptor: int, *, is_folder: bool) -> None:
    """Folders as they are; files, which are data, can be read alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        path.mkdir(exist_ok=True)
    else:
        path.touch()
    _mount(f"/proc/self/fd/{descriptor}", path, None, _BIND | _RECURSIVE)
    with suppress(OSError):  # a user's own view may not be allowed to change how its parts are mounted
        if not is_folder:
            _mount("none", path, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SUID | _NO_DEV)


def _environments_of_ancestors() -> Iterator[Path]:
    """Secrets that the worker has stay with it."""
    pid = os.getppid()
    while pid > 1:
        yield Path(f"/proc/{pid}/environ")
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return


def _own_view() -> None:
    """Raises:
    OSError: this machine does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    flags = _NEW_MOUNTS if user == 0 else _NEW_MOUNTS | _NEW_USER
    if _libc().unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", Path("/"), None, _RECURSIVE | _PRIVATE)


def _mount(source: str, target: Path, kind: str | None, flags: int) -> None:
    told = kind.encode() if kind is not None else None
    if _libc().mount(source.encode(), os.fsencode(target), told, flags, None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(target))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p,
    )  # fmt: skip
    return libc
