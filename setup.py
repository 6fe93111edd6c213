"""What pyproject.toml cannot say: how a checkout's folders become one package in a wheel.

A checkout has `app`, `workers` and `alembic` side by side. Installed like that they would be in the way of
the packages of whoever embeds the service, many of which are called just so. In a wheel they are
`accrue.app`, `accrue.workers` and `accrue.app.alembic`, and what imports them is rewritten; an editable
installation has them as they are.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel

MOVED = ("app", "workers")
IMPORTS = re.compile(rf"^(\s*)(from|import) ({'|'.join(MOVED)})(?=[. \n])", re.MULTILINE)

INIT = '''"""Fine-tuning at the effective batch you want, on the GPU you have."""

from typing import Any


def create_app(*arguments: Any, **options: Any) -> Any:
    """The service as an ASGI application: see `accrue.app.main.create_app`."""
    from accrue.app.main import create_app as create

    return create(*arguments, **options)
'''


class AsOnePackage(bdist_wheel):
    """Packs a wheel. For an editable installation, setuptools uses this class only to write the metadata."""

    packs = False

    def run(self) -> None:
        self.packs = True
        super().run()

    def write_wheelfile(self, wheelfile_base: str, *arguments: object) -> None:
        if self.packs:
            move(Path(self.bdist_dir), Path(wheelfile_base))
        super().write_wheelfile(wheelfile_base, *arguments)


def move(built: Path, metadata: Path) -> None:
    """Moves the built packages into the package `accrue`, and adapts the wheel's metadata."""
    package = built / "accrue"
    package.mkdir()
    (package / "__init__.py").write_text(INIT)
    for name in MOVED:
        shutil.move(built / name, package / name)
    for source in package.rglob("*.py"):
        source.write_text(IMPORTS.sub(r"\1\2 accrue.\3", source.read_text()))
    commands = metadata / "entry_points.txt"
    commands.write_text(re.sub(r"= app\.", "= accrue.app.", commands.read_text()))
    (metadata / "top_level.txt").write_text("accrue\n")


setup(
    packages=[
        *find_namespace_packages(include=["app", "app.*", "workers", "workers.*"]),
        "app.alembic",
        "app.alembic.versions",
    ],
    package_dir={"app.alembic": "alembic", "app.alembic.versions": "alembic/versions"},
    package_data={"app.alembic": ["script.py.mako"]},
    cmdclass={"bdist_wheel": AsOnePackage},
)
