"""Training files in the service's folder (`ACCRUE_DATASETS_DIR`), by name."""

from pathlib import Path

from app.errors import Unprocessable
from app.settings import Settings

_FIELD = "dataset_config.dataset"


def find(name: str, settings: Settings) -> Path:
    """The file of that name, with or without `.jsonl`; links are not followed.

    Raises:
        Unprocessable: no such file; the message lists up to 20 available names.
    """
    if settings.datasets_dir is None:
        raise Unprocessable("ACCRUE_DATASETS_DIR is not set: upload the data instead.", field=_FIELD)
    root = settings.datasets_dir.resolve()
    for path in (root / name, root / f"{name}.jsonl"):
        if path.is_file() and path.resolve() == path:
            return path
    there = ", ".join(_names(root)[:20]) or "none"
    raise Unprocessable(f"No data set is called {name}. Available: {there}.", field=_FIELD)


def _names(root: Path) -> list[str]:
    found = [*root.glob("*.jsonl"), *root.glob("*/*.jsonl")]
    return sorted(str(path.relative_to(root)) for path in found if path.resolve() == path)
