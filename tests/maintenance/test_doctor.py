"""What `accrue doctor` says of torch, models and the engine that trainers run in."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.devices import gpus
from app.maintenance import doctor
from app.planning.devices import GIB, Device
from app.settings import Settings

VERSION = (
    "__version__ = {version!r}\ndebug = False\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n"
)
CUDA = VERSION.format(version="2.13.0+cu130", cuda="13.0", hip=None)
CPU = VERSION.format(version="2.13.0+cpu", cuda=None, hip=None)
ROCM = VERSION.format(version="2.13.0+rocm7.1", cuda=None, hip="7.1")


@pytest.mark.parametrize(
    ("text", "gpu", "verdict", "message"),
    [
        (CUDA, True, "ok", "2.13.0+cu130, for CUDA 13.0"),
        (ROCM, False, "ok", "for ROCm 7.1"),
        (CPU, False, "ok", "2.13.0+cpu, for CPUs"),
        (CPU, True, "error", "install a CUDA build"),
        (CPU.replace("'", '"'), False, "ok", "2.13.0+cpu, for CPUs"),
        ("# nothing", False, "error", "install it again"),
        ("\udcff", False, "error", "install it again"),
        (None, True, "ok", "no worker"),
    ],
)
def test_the_build_of_torch_is_reported(
    text: str | None, gpu: bool, verdict: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(text or "", errors="surrogateescape")
    found = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py")) if text is not None else None
    monkeypatch.setattr(doctor, "find_spec", lambda _: found)
    seen = [Device(0, "NVIDIA L4", 24 * GIB, "cuda")] if gpu else []
    monkeypatch.setattr(gpus, "detected", lambda: seen)
    finding = doctor._torch()
    assert finding.verdict == verdict
    assert message in finding.message


def test_models_of_owners_are_counted_as_well(settings: Settings) -> None:
    assert settings.models_dir is not None
    for name in ("plain", "owner/with-weights", "owner/without"):
        (settings.models_dir / name).mkdir(parents=True)
        (settings.models_dir / name / "config.json").write_text("{}")
    for name in ("plain", "owner/with-weights"):
        (settings.models_dir / name / "model.safetensors").touch()
    assert "no safetensors in owner/without:" in doctor._models(settings).message
    (settings.models_dir / "owner/without/model.safetensors").touch()
    assert doctor._models(settings).message.startswith("3 in ")


@pytest.mark.parametrize(
    ("script", "verdict", "message"),
    [
        ("echo 'gpu 4 idle'", "ok", "slurm answers; 2 devices"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "error", "Unable to contact"),
        (None, "error", "sinfo"),
    ],
)
def test_the_engine_of_trainers_is_called(
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str | None,
    verdict: str,
    message: str,
) -> None:
    if script is not None:
        program = tmp_path / "sinfo"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen = settings.model_copy(update={"executor": "slurm", "executor_devices": "A100-80GB,A100-80GB"})
    (found,) = [each for each in doctor.examine(chosen) if each.what == "engine"]
    assert found.verdict == verdict
    assert message in found.message


@pytest.mark.parametrize(("free", "verdict"), [(50e6, "error"), (2e9, "warning"), (100e9, "ok")])
def test_a_full_disk_is_an_error(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, free: float, verdict: str
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert doctor._disk_space(settings).verdict == verdict
