"""Imports point one way: routes, then schemas, planning, jobs, stats, then models, database, settings."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ABOVE = ("app.main", "app.routes", "app.cli")
SOURCES = sorted([*ROOT.glob("app/**/*.py"), *ROOT.glob("workers/**/*.py")])


def imported(source: Path) -> set[str]:
    """Every module that a source imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def within(names: set[str], *packages: str) -> set[str]:
    return {name for name in names if any(name == p or name.startswith(f"{p}.") for p in packages)}


@pytest.mark.parametrize("source", [s for s in SOURCES if "app" in s.parts], ids=str)
def test_the_service_imports_no_worker_and_no_torch(source: Path) -> None:
    assert not within(imported(source), "workers", "torch", "transformers", "peft")


@pytest.mark.parametrize("source", sorted(ROOT.glob("workers/training/**/*.py")), ids=str)
def test_the_trainer_knows_only_schemas_and_its_run_directory(source: Path) -> None:
    ours = within(imported(source), "app", "workers")
    known = ("app.schemas", "app.fail_points", "workers.training", "workers.run_directory")
    assert not ours - within(ours, *known) - {"workers", "app", "app.FOLDER", "app.PREFIX"}
    assert not within(imported(source), "sqlalchemy", "fastapi", "structlog", "pydantic_settings")


@pytest.mark.parametrize("source", sorted(ROOT.glob("app/schemas/*.py")), ids=str)
def test_schemas_need_pydantic_alone(source: Path) -> None:
    ours = within(imported(source), "app")
    assert ours == within(ours, "app.schemas")
    third_party = {name.split(".")[0] for name in imported(source)} - {"app"} - set(sys.stdlib_module_names)
    assert third_party <= {"pydantic", "pydantic_core"}


@pytest.mark.parametrize("source", sorted(ROOT.glob("app/planning/*.py")), ids=str)
def test_planning_is_pure(source: Path) -> None:
    names = imported(source)
    assert within(names, "app") == within(names, "app.planning", "app.schemas")
    assert not within(names, "os", "time", "pathlib", "sqlalchemy", "random")


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("app/http", (*ABOVE, "app.submitting", "app.results", "app.upkeep", "app.data")),
        ("app/submitting", (*ABOVE, "app.http", "app.results", "app.upkeep")),
        ("app/upkeep", (*ABOVE, "app.http", "app.submitting")),
        ("app/results", (*ABOVE, "app.http", "app.submitting", "app.upkeep", "app.data")),
        ("app/data", (*ABOVE, "app.http", "app.submitting", "app.upkeep", "app.results")),
        ("app/jobs.py", (*ABOVE, "app.http", "app.submitting", "app.upkeep", "app.results", "app.data")),
        ("app/stats.py", (*ABOVE, "app.jobs")),
        ("app/models.py", ("app.routes", "app.jobs", "app.stats", "app.planning", "app.database")),
        ("app/database.py", ("app.routes", "app.jobs", "app.stats", "app.models")),
    ],
)
def test_lower_layers_know_nothing_of_higher_ones(lower: str, higher: tuple[str, ...]) -> None:
    sources = [ROOT / lower] if lower.endswith(".py") else sorted((ROOT / lower).glob("*.py"))
    assert sources
    for source in sources:
        assert not within(imported(source), *higher), source


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("app.main", {"torch", "transformers", "pyarrow", "matplotlib", "workers"}),
        ("app.cli", {"torch", "fastapi", "sqlalchemy"}),
        ("workers.supervisor", {"torch", "transformers"}),
        ("app.schemas.spec", {"torch", "sqlalchemy", "fastapi", "pydantic_settings"}),
    ],
)
def test_what_a_module_loads(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not forbidden & set(loaded.stdout.split())
