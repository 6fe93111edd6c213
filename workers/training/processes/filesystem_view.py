"""Hides from a trainer other jobs' files, other processes' temporary files, most devices and files with keys
and passwords, and makes the rest read-only except for its own folders.

A model's files and training data are untrusted, and might exploit a library that reads them to open other
files or to run code. A trainer cannot put files that it does not see into its model, and cannot write files
that other trainers read. If the machine does not support mount namespaces (systems other than Linux, some
containers), the trainer runs without isolation.
"""

import ctypes
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from app import PACKAGES_FOLDER
from app.contract.assignment import Assignment
from app.contract.model_reference import ModelReference
from app.contract.regular_files import NotRegular
from workers.run_directory import HIDDEN_VARIABLE, SECRET_FILES_VARIABLE

log = logging.getLogger("accrue.trainer")

_READ_ONLY, _NO_SUID, _NO_DEV, _REMOUNT, _BIND, _RECURSIVE = 1, 2, 4, 32, 4096, 16384
_DETACH = 2
"""A flag of umount2(2)."""

_MOUNT_SETATTR, _HERE, _ALL_BELOW = 442, -100, 0x8000
_MOUNT_READ_ONLY, _MOUNT_NO_SUID = 1, 2
"""Flags of mount_setattr(2), whose number is the same on every architecture."""

_NO_NEW_PRIVILEGES, _DROP_FROM_BOUNDS, _SET_DUMPABLE = 38, 24, 4
_ANY_FILE, _MAX_CAPABILITIES, _CAPABILITIES_3 = 1, 64, 0x20080522
"""Constants of prctl(2) and capset(2); CAP_DAC_OVERRIDE is the only one of capabilities(7) that is kept."""

_TMPFS_OPTIONS = b"size=10%,nr_inodes=200k"
"""Options of tmpfs(5): a share of the machine's memory for each temporary folder."""

_SHARED = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders that every process may write to; an isolated process gets empty ones of its own."""

_DEVICES = (
    "null", "zero", "full", "random", "urandom", "tty",
    "nvidia*", "nvidia-caps", "dri", "kfd", "dxg", "infiniband", "gdrdrv",
)  # fmt: skip
"""The only devices in /dev: GPUs (dxg: in the Windows Subsystem for Linux) and the network between them; no
disk, no memory, no console."""

_KERNEL_PARTS = ("sys", "irq", "bus", "fs", "acpi", "scsi", "sysrq-trigger")
"""Parts of /proc that configure the kernel; the others are about processes."""

_SECRETS = (
    ".ssh", ".aws", ".azure", ".config/gcloud", ".oci", ".kube", ".docker", ".gnupg", ".netrc", ".pgpass",
    ".git-credentials", ".config/git/credentials", ".config/gh", ".config/rclone", ".pypirc", ".npmrc",
    ".boto", ".s3cfg", ".kaggle", ".vault-token", ".cache/huggingface/token",
    ".cache/huggingface/stored_tokens",
    ".bash_history", ".zsh_history", ".python_history", ".psql_history",
)  # fmt: skip
"""Files and folders below a user's home in which programs usually keep keys and passwords."""

_MOUNTED_SECRETS = ("/run/secrets", "/var/run/secrets")
"""Where Docker and Kubernetes put secrets of a container."""

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH", "CUDA_CACHE_PATH")
"""Variables that name the caches of compiled code, which is executed from there."""


def named_view(folder: Path, assignment: Assignment) -> str:
    """The view that the supervisor passes to `isolate` in the environment.

    It is passed there, since the trainer may write to its own folder.

    Args:
        folder: the folder of which the trainer may see only what it needs.
    """
    return json.dumps({"folder": str(folder.resolve()), "files": [str(path) for path in _needed(assignment)]})


def isolate(run: Path) -> bool:
    """Hides the data folder that the supervisor names, except for this run and the files that it needs.

    Call it in a process with mounts of its own (process_tree.py), before there is a second thread.

    Returns:
        Whether anything is hidden now.
    """
    named = json.loads(os.environ.get(HIDDEN_VARIABLE) or "{}")
    if not named:
        return False
    needed = {Path(path): False for path in named["files"]}
    hidden = Path(named["folder"])
    return hidden in run.resolve().parents and restrict_view(hidden, {**needed, run.resolve(): True})


def restrict_view(hidden: Path, needed: Mapping[Path, bool]) -> bool:
    """Hides a folder from this process except for what is needed in it, makes the temporary folders empty,
    and hides files with keys and passwords.

    It then drops the capabilities with which a process could undo this, or inspect other processes.

    Args:
        needed: maps paths to whether they are written to. Other paths elsewhere stay visible, but read-only.

    Returns:
        Whether the folder is hidden now.
    """
    if sys.platform != "linux":
        return False
    needed = {**dict.fromkeys(code_and_caches(), False), **needed}
    needed |= {path: True for name in _DEVICES for path in Path("/dev").glob(name)}
    own = {Path(path).resolve() for path in (*_SHARED, tempfile.gettempdir()) if Path(path).exists()}
    try:
        if hidden in needed:
            raise OSError(0, f"{hidden} itself is needed")
        for folder in sorted({hidden, Path("/dev"), *own}, key=lambda path: len(path.parts)):
            _hide(folder, needed)
        for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            Path("/dev", name).symlink_to(f"/proc/self/{target}")
        os.chdir(Path.cwd())  # enter it again by name: the current folder is still the hidden one
        _hide_secrets(needed)
        written = {**needed, Path("/dev"): True, **dict.fromkeys(own, True)}
        with suppress(OSError):  # a kernel before 5.12, or a container that forbids it
            _make_read_only_except(
                {path: is_written for path, is_written in written.items() if path.exists()}
            )
    except OSError as error:
        log.info("the trainer sees the whole data folder: %s", error.strerror)
        _hide_secrets(needed)
        return False
    finally:
        drop_capabilities()
        _move_caches()
    return True


def show_model(
    model: ModelReference,
    path: str,
    layer_paths: Iterable[str],
    own: Mapping[Path, bool],
    hidden: str | None,
    *,
    apart: bool,
) -> None:
    """Hides, for a process that only reads a model, what it does not need.

    Args:
        path: the folder of the model's files, or its name on the hub.
        layer_paths: the folders of adapters that belong to the model.
        own: what else the process needs, and whether it writes there.
        hidden: the folder to hide; None: nothing is hidden.
        apart: whether this process has its own mounts.

    Raises:
        NotRegular: a folder that a job wrote is a link.
    """
    if not apart or hidden is None:
        drop_capabilities()
        return
    needed = {model_folder(model, path): False}
    needed |= {unlinked(layer): False for layer in layer_paths}
    needed |= {folder.resolve(): is_written for folder, is_written in own.items()}
    restrict_view(Path(hidden), needed)


def _move_caches() -> None:
    """Moves the caches of compiled code to the temporary folder. PyTorch does not create the one that it is
    given for its own kernels."""
    for name in _CACHES:
        folder = Path(tempfile.gettempdir()) / name.lower()
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
        os.environ[name] = str(folder)


def _secrets() -> Iterator[Path]:
    """Files and folders with keys and passwords: those that the worker names, and those that others use."""
    yield from map(Path, filter(None, os.environ.get(SECRET_FILES_VARIABLE, "").split(os.pathsep)))
    yield from (Path.home() / name for name in _SECRETS)
    yield from map(Path, _MOUNTED_SECRETS)


def _hide_secrets(needed: Mapping[Path, bool]) -> None:
    """Mounts empty folders and files over those with keys and passwords, unless something in them is needed:
    `.env` may be a virtual environment."""
    for path in (path.resolve() for path in _secrets()):
        if any(path in (each, *each.parents) for each in needed):
            log.info("the trainer can read %s, of which it needs a part", path)
            continue
        try:
            if path.is_dir():
                _mount("tmpfs", path, "tmpfs", _READ_ONLY | _NO_SUID | _NO_DEV, b"size=4k")
            elif path.is_file():
                _mount("/dev/null", path, None, _BIND)
        except OSError as error:
            log.info("the trainer can read %s: %s", path, error.strerror)


def _hide(folder: Path, needed: Mapping[Path, bool]) -> None:
    """Mounts an empty folder over a folder, and mounts the needed paths of that folder in it.

    Raises:
        OSError: it could not be done; everything is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)  # it may be in a folder that was hidden before
    with ExitStack() as opened:
        kept: list[tuple[Path, int, bool]] = []
        for path in sorted(
            needed
        ):  # open it in this namespace: descriptors of another one cannot be mounted here
            if folder in path.parents and path.exists():
                descriptor = os.open(path, os.O_PATH)
                opened.callback(os.close, descriptor)
                kept.append((path, descriptor, path.is_dir()))
        mode = folder.stat().st_mode & 0o7777
        _mount("tmpfs", folder, "tmpfs", _NO_SUID | _NO_DEV, _TMPFS_OPTIONS)
        try:
            folder.chmod(mode)
            for path, descriptor, is_folder in kept:
                _put_back(path, descriptor, is_folder=is_folder, is_written=needed[path])
        except OSError:
            _libc().umount2(os.fsencode(folder), _DETACH)
            raise


def _make_read_only_except(needed: Mapping[Path, bool]) -> None:
    """Makes every file system read-only, except for the folders to be written to and the parts of /proc about
    processes, so that the trainer cannot change what other processes run, such as the code of other
    trainers.

    Raises:
        OSError: it could not be done; everything is as it was.
    """
    kernel_s = {path: False for name in _KERNEL_PARTS if (path := Path("/proc", name)).exists()}
    chosen = {Path("/proc"): True, **needed, **kernel_s}
    outer_first = sorted(chosen, key=lambda path: len(path.parts))  # deeper mounts override outer ones
    for path in outer_first:
        if path != Path("/proc"):
            _mount(str(path), path, None, _BIND | _RECURSIVE)
    _set_attributes(Path("/"), read_only=True)
    try:
        for path in outer_first:
            _set_attributes(path, read_only=not chosen[path])
    except OSError:
        _set_attributes(Path("/"), read_only=False)
        raise


def _set_attributes(path: Path, *, read_only: bool) -> None:
    """Calls mount_setattr(2) for a mount and those below it."""
    set_bits = _MOUNT_NO_SUID | (_MOUNT_READ_ONLY if read_only else 0)
    attributes = (ctypes.c_uint64 * 4)(set_bits, 0 if read_only else _MOUNT_READ_ONLY, 0, 0)
    libc = _libc()
    done = libc.syscall(
        _MOUNT_SETATTR, _HERE, os.fsencode(path), _ALL_BELOW, attributes, ctypes.sizeof(attributes)
    )
    if done != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))


def unlinked(path: str) -> Path:
    """The path of a folder that another job wrote, as the worker found it.

    Raises:
        NotRegular: the folder, or one above it, is a link by now.
    """
    found = Path(path)
    if found.resolve() != found:
        raise NotRegular(found)
    return found


def model_folder(model: ModelReference, path: str) -> Path:
    """The folder with a model's files; the name of a model on the hub leads to none.

    Raises:
        NotRegular: another job wrote it, and it is a link by now.
    """
    return unlinked(path) if model.source == "job" else Path(path).resolve()


def _needed(assignment: Assignment) -> Iterator[Path]:
    for name in (assignment.data_file, assignment.validation_file):
        if name is not None:
            yield Path(name).resolve()
    if Path(assignment.model_path).is_absolute():  # a relative path is a name on the hub
        yield model_folder(assignment.spec.model, assignment.model_path)
    yield from map(unlinked, assignment.layer_paths)


def code_and_caches() -> Iterator[Path]:
    """The folders of Python, its packages and the hub's cache, which may be inside a hidden folder."""
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE"):
        if variable in os.environ:
            yield Path(os.environ[variable]).resolve()
    yield (Path.home() / ".cache").resolve()
    code = (
        PACKAGES_FOLDER,
        Path(sys.prefix),
        Path(sys.base_prefix),
        *(Path(entry) for entry in sys.path if entry),
    )
    yield from (path.resolve() for path in code)


def _put_back(path: Path, descriptor: int, *, is_folder: bool, is_written: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        path.mkdir(exist_ok=True)
    else:
        path.touch()
    _mount(f"/proc/self/fd/{descriptor}", path, None, _BIND | _RECURSIVE)
    if not is_written:
        with suppress(OSError):  # a user namespace may not be allowed to remount
            _mount("none", path, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SUID | _NO_DEV)


def drop_capabilities() -> None:
    """Drops all of root's capabilities except that of reading and writing files of all users.

    The process then cannot unmount anything, create devices or open files by their inode number. The kernel
    also stops it from inspecting processes with more capabilities (their root, environment and memory;
    ptrace(2), "Ptrace access mode checking").
    """
    libc = _libc()
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for power in range(_MAX_CAPABILITIES):
        if power != _ANY_FILE:
            libc.prctl(_DROP_FROM_BOUNDS, power, 0, 0, 0)
    header, kept = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)()
    current = (ctypes.c_uint32 * 6)()
    if libc.capget(header, current) == 0:
        own = current[1] & (1 << _ANY_FILE)
        kept[0], kept[1] = own, own
        libc.capset(header, kept)
    if os.getuid() == 0:  # else other root processes with as few capabilities could inspect it
        libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def _mount(source: str, target: Path, kind: str | None, flags: int, options: bytes | None = None) -> None:
    file_system = kind.encode() if kind is not None else None
    if _libc().mount(source.encode(), os.fsencode(target), file_system, flags, options) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(target))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p,
    )  # fmt: skip
    return libc
