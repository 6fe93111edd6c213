"""Imports point one way: routes and web, then domains, then storage, settings, planning and the contract."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("app/**/*.py"), *ROOT.glob("workers/**/*.py")])

LAYERS: tuple[tuple[str, ...], ...] = (
    ("app.contract", "app.errors", "app.logs"),
    ("app.planning",),
    ("app.settings",),
    ("app.storage",),
    ("app.devices", "app.security", "app.runtime", "app.webhooks", "app.statistics"),
    ("app.hub", "app.usage"),
    ("app.memory_profiles", "app.datasets"),
    ("app.jobs",),
    ("app.results",),
    ("app.models",),
    (
        "app.planning.inputs",
        "app.planning.batch_size",
        "app.planning.recommendation_inputs",
        "app.planning.job_advice",
    ),
    ("app.submissions", "app.inference", "app.exports"),
    ("app.sweeps",),
    ("app.maintenance", "app.observability"),
    ("app.web",),
    ("routes",),
    ("app.main",),
    ("app.cli",),
)
"""From the lowest to the highest: a module imports from its own package and from lower layers alone. A
module named here goes before its package; `routes` are those of every package."""

LOOKS_UP = LAYERS[10]
"""The part of planning that looks into the database; the rest is pure."""


def module_of(source: Path) -> str:
    parts = source.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


def layer(module: str) -> int:
    """The layer of a module, by the longest name that it is under; `app` itself is under all."""
    if module == "app" or module.removeprefix("app.") in ("PACKAGE_PREFIX", "PACKAGES_FOLDER", "__version__"):
        return 0
    if module.startswith("app.") and module.rsplit(".", 1)[-1].endswith("routes"):
        return next(number for number, names in enumerate(LAYERS) if "routes" in names)
    found = [(len(name), number) for number, names in enumerate(LAYERS) for name in names
             if module == name or module.startswith(f"{name}.")]  # fmt: skip
    assert found, f"{module} is in no layer"
    return max(found)[1]


@pytest.mark.parametrize("source", [s for s in SOURCES if "app" in s.parts], ids=module_of)
def test_modules_import_only_from_lower_layers(source: Path) -> None:
    module = module_of(source)
    own, package = layer(module), ".".join(module.split(".")[:2])
    modules = {module_of(each) for each in SOURCES}
    for name in within(imported(source), "app"):
        target = name if name in modules else name.rsplit(".", 1)[0]
        is_own_package = within({target}, package) and not target.endswith("routes")
        assert layer(target) < own or (layer(target) == own and is_own_package), f"{module} imports {target}"


@pytest.mark.parametrize("source", [s for s in SOURCES if "app" in s.parts], ids=module_of)
def test_the_service_imports_no_worker_and_no_torch(source: Path) -> None:
    assert not within(imported(source), "workers", "torch", "transformers", "peft")


@pytest.mark.parametrize("source", sorted(ROOT.glob("workers/training/**/*.py")), ids=module_of)
def test_the_trainer_knows_the_contract_and_its_run_directory(source: Path) -> None:
    ours = within(imported(source), "app", "workers")
    known = within(ours, "app.contract", "workers.training", "workers.run_directory", "workers.reporter")
    assert not ours - known - {"workers", "app", "app.PACKAGES_FOLDER", "app.PACKAGE_PREFIX"}
    assert not within(imported(source), "sqlalchemy", "fastapi", "structlog", "pydantic_settings")


@pytest.mark.parametrize("source", sorted(ROOT.glob("app/contract/*.py")), ids=module_of)
def test_contract_imports_only_pydantic(source: Path) -> None:
    ours = within(imported(source), "app")
    assert ours == within(ours, "app.contract")
    third_party = {name.split(".")[0] for name in imported(source)} - {"app"} - set(sys.stdlib_module_names)
    assert third_party <= {"pydantic", "pydantic_core"}


def pure() -> list[Path]:
    modules = sorted(ROOT.glob("app/planning/*.py"))
    return [s for s in modules if module_of(s) not in LOOKS_UP and not s.stem.endswith("routes")]


@pytest.mark.parametrize("source", pure(), ids=module_of)
def test_planning_is_pure(source: Path) -> None:
    names = imported(source)
    assert within(names, "app") == within(names, "app.planning", "app.contract", "app.errors")
    assert not within(names, "os", "time", "pathlib", "sqlalchemy", "random")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("app.main", {"torch", "transformers", "pyarrow", "matplotlib", "workers"}),
        ("app.cli", {"torch", "fastapi", "sqlalchemy"}),
        ("workers.supervisor", {"torch", "transformers"}),
        ("app.contract.spec", {"torch", "sqlalchemy", "fastapi", "pydantic_settings"}),
        (
            "tests.gpu.acceptance, workers.training.fit",  # they run on machines that have little installed
            {"fastapi", "sqlalchemy", "typer", "structlog", "rich", "pytest", "datasets"},
        ),
    ],
)
def test_modules_do_not_load_forbidden_packages(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not forbidden & set(loaded.stdout.split())


@pytest.mark.parametrize("source", sorted(ROOT.glob("tests/**/*.py")), ids=lambda source: source.stem)
def test_no_test_imports_a_test(source: Path) -> None:
    tests = within(imported(source), "tests")
    found = {name for name in tests if name.split(".")[-1] == "conftest" or ".test_" in name}
    assert not found, "what several tests need is in tests/harness"


def test_the_readme_names_every_package() -> None:
    tree = (ROOT / "README.md").read_text()
    packages = {module_of(source).replace(".", "/") for source in SOURCES if source.name == "__init__.py"}
    assert not [package for package in packages if f"`{package}/`" not in tree]


def test_git_tracks_no_other_source_folder() -> None:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    folders = {path.split("/")[0] for path in listed.stdout.splitlines() if "/" in path}
    assert folders <= {".ci", "alembic", "app", "docker", "docs", "tests", "workers"}
