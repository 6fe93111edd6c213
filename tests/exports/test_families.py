"""Every family that is trained can be exported, and the export agrees with what was trained."""

from pathlib import Path

import pytest

from app.contract.export import ExportFormat
from app.contract.model_reference import LoraSpec
from app.contract.spec import MethodSpec, ValidationSpec
from tests.harness.any_family import ALL, lay_any
from tests.harness.exports import task_of
from tests.harness.runs import small_data
from tests.harness.specs import make_spec
from tests.harness.training import run_to_end
from workers.exports import make as exports

FAMILIES = ("llama", "gemma3", "gpt_oss", "bamba")
"""Rotary positions, a multimodal family, experts whose adapters are not linear layers, and a state space."""
LORA = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)


def exported(folder: Path, family: str, form: ExportFormat) -> float:
    """The agreement of an export of a family's adapters, near ties included."""
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(
        data=small_data(validation=share, max_length=32),
        method=MethodSpec(name="lora", lora=LORA),
        max_steps=2,
    )
    run = lay_any(folder / "run", family, spec)
    run_to_end(run)
    found = exports.make(task_of(run, folder / form, form)).verification
    assert found is not None
    assert found.tokens > 100
    return found.agreement + found.near_ties


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_adapters_of_any_family_are_exported(tmp_path: Path, family: str, form: ExportFormat) -> None:
    assert exported(tmp_path, family, form) >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL)
def test_every_family_is_exported(tmp_path: Path, family: str) -> None:
    """Each that can be trained at this size."""
    try:
        agreement = exported(tmp_path, family, "merged")
    except Exception as error:
        if not (tmp_path / "run" / "model").is_dir():
            pytest.skip(f"not trained: {type(error).__name__}")
        raise
    assert agreement >= 0.999
