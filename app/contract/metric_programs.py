"""Metrics of the operator's own: programs in a folder, by their names."""

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def metric_programs(folder: Path | None) -> dict[str, str]:
    """The programs in a folder by their metrics' names: executable files, and Python files without their
    suffix. Empty without a folder."""
    if folder is None or not folder.is_dir():
        return {}
    found = {}
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(".py")
        is_program = path.suffix == ".py" or bool(path.stat().st_mode & 0o111)
        if path.is_file() and is_program and _NAME.fullmatch(name):
            found[name] = str(path.resolve())
    return found
