"""Folders are deleted, whatever a trainer has put into them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from app.storage.disk import remove_tree

FLIP = """
import ctypes, os, sys
libc, folder = ctypes.CDLL(None, use_errno=True), sys.argv[1].encode()
os.chdir(os.path.dirname(folder))
print("ready", flush=True)
while True:  # exchanges each folder of the run with a link that leads out of it
    for number in range(8):
        libc.renameat2(-100, folder + b"/d%d" % number, -100, b"link%d" % number, 2)
"""


def test_a_deep_folder_is_deleted(tmp_path: Path) -> None:
    top = tmp_path / "run"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):  # deeper than Python's stack, longer than any path may be
        os.mkdir("folder", dir_fd=here)
        inner = os.open("folder", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    remove_tree(top)
    assert not top.exists()


def test_targets_of_links_are_not_deleted(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    top = tmp_path / "run"
    (top / "inner").mkdir(parents=True)
    (top / "link").symlink_to(kept)
    (top / "inner" / "link").symlink_to(kept / "file")
    (top / "inner" / "closed").mkdir(mode=0)
    remove_tree(top)
    assert not top.exists()
    assert (kept / "file").exists()
    top.symlink_to(kept)
    remove_tree(top)
    assert not top.is_symlink()
    assert (kept / "file").exists()


def test_deleting_a_missing_folder_succeeds(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")


@pytest.mark.skipif(sys.platform != "linux", reason="exchanges names by renameat2")
def test_replacing_a_folder_by_a_link_does_not_redirect_the_deletion(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "inner").mkdir(parents=True)
    top = tmp_path / "run"
    with ended(subprocess.Popen([sys.executable, "-c", FLIP, str(top)], stdout=subprocess.PIPE)) as flipping:
        assert flipping.stdout is not None
        assert flipping.stdout.readline() == b"ready\n"
        for _ in range(40):
            top.mkdir(exist_ok=True)
            for number in range(50):
                (kept / f"file{number}").touch()
            for number in range(8):
                with suppress(FileExistsError, FileNotFoundError):  # it may change its name at any time
                    (top / f"d{number}").mkdir()
                with suppress(FileExistsError, FileNotFoundError):
                    (top / f"d{number}" / "inner").mkdir()
                if not os.path.lexists(tmp_path / f"link{number}"):
                    (tmp_path / f"link{number}").symlink_to(kept)
            remove_tree(top)
            assert len(list(kept.iterdir())) == 51
            assert kept.stat().st_mode & 0o777 != 0o700


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_an_incomplete_deletion_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = tmp_path / "run"
    (top / "inner").mkdir(parents=True)
    assert remove_tree(tmp_path / "none")
    with monkeypatch.context() as patched:
        patched.setattr("app.storage.disk.os.rmdir", _refuse)
        assert not remove_tree(top)
    assert remove_tree(top)


def _refuse(*arguments: object, **options: object) -> None:
    raise PermissionError
