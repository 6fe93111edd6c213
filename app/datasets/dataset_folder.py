"""Training data in the service's folder (`ACCRUE_DATASETS_DIR`), by name: files, and folders of files."""

from pathlib import Path

from app.datasets import hub_datasets
from app.datasets.content import DataFiles
from app.datasets.file_types import SUFFIXES, ReadOptions
from app.errors import Unprocessable
from app.settings import Settings

_FIELD = "dataset_config.dataset"
_MOST_FILES = 1000


def find(name: str, how: ReadOptions, settings: Settings) -> DataFiles:
    """The files of the dataset with that name, with or without its suffix; links are not followed. What is
    not in the folder may be a dataset of the hub.

    A folder's data is that of its files, in the order of their names; if some names begin with `train`, only
    these are used.

    Raises:
        Unprocessable: no such dataset; the message lists up to 20 available names.
    """
    may_be_on_hub = "/" in name and not settings.offline
    if settings.datasets_dir is None:
        if may_be_on_hub:
            return hub_datasets.find(name, how, settings)
        raise Unprocessable("ACCRUE_DATASETS_DIR is not set: upload the data instead.", field=_FIELD)
    root = settings.datasets_dir.resolve()
    for path in (root / name, *(root / f"{name}{suffix}" for suffix in SUFFIXES)):
        if path.is_file() and path.resolve() == path:
            return DataFiles(((path, path.name),), how)
    folder = root / name
    if folder.is_dir() and folder.resolve() == folder and folder != root and (inside := _inside(folder)):
        return DataFiles(tuple((path, path.name) for path in inside), how)
    if may_be_on_hub:
        return hub_datasets.find(name, how, settings)
    there = ", ".join(_names(root)[:20]) or "none"
    raise Unprocessable(f"No dataset is called {name}. Available: {there}.", field=_FIELD)


def _inside(folder: Path) -> list[Path]:
    """The data files of a folder and its `data` folder, in which the hub's datasets have theirs.

    Raises:
        Unprocessable: too many.
    """
    found = [path for own in (folder, folder / "data") for path in _files(own)]
    chosen = [path for path in found if path.name.startswith("train")] or found
    if len(chosen) > _MOST_FILES:
        raise Unprocessable(
            f"{folder.name} has {len(chosen)} files, more than {_MOST_FILES}: join some.", field=_FIELD
        )
    return chosen


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    named = [path for path in found if path.suffix.lower() in SUFFIXES]
    named = [path for path in named if not path.name.startswith((".", "README"))]
    return [path for path in named if path.is_file() and path.resolve() == path]


def _names(root: Path) -> list[str]:
    """The names of files, and of folders that have data files."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
    named = [path for own in (root, *folders) for path in _files(own)]
    named += [path for path in folders if path.resolve() == path and _files(path / "data")]
    return sorted(str(path.relative_to(root)) for path in named)
