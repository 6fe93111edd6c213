"""Folders are deleted, whatever a trainer has put into them."""

import os
from pathlib import Path

from app.storage.disk import remove_tree


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


def test_what_links_point_to_stays(tmp_path: Path) -> None:
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


def test_a_folder_that_is_not_there_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")
