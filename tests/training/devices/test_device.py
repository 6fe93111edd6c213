"""The kernels that a trainer uses on a GPU, as far as a CPU shows: settings, messages, and the simulation."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.integrations import sdpa_attention

from app.contract.memory_profile import Recipe
from app.contract.spec import RunPrecision
from app.planning.devices import GIB, Device
from app.planning.recipes import recipe_of
from tests.benchmarks.accuracy import FAMILIES
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from tests.harness.training import run_to_end, weights
from workers.profiling.depth import Depth
from workers.profiling.simulate import Simulation
from workers.training import start
from workers.training.attempt import _crash
from workers.training.devices import device
from workers.training.exceptions import CannotTrain
from workers.training.kernels import attention

GPU = Device(0, "NVIDIA H100", 80 * GIB, "cuda", compute_capability=9.0)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores this process's settings."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    kernels = torch.backends.cuda
    before = kernels.cudnn_sdp_enabled(), kernels.mem_efficient_sdp_enabled()
    yield
    torch.use_deterministic_algorithms(False)
    kernels.enable_cudnn_sdp(before[0])
    kernels.enable_mem_efficient_sdp(before[1])


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("precision", "repeats"), [("bf16", False), ("fp32", True), ("tf32", True)])
def test_attention_on_a_gpu_uses_kernels_that_need_no_plan_for_each_shape(
    precision: RunPrecision, repeats: bool, deterministic: bool
) -> None:
    attention.choose_kernels(precision, deterministic=deterministic)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled() != deterministic
    states = torch.zeros(1, 2, 4, 8)
    assert sdpa_attention.use_gqa_in_sdpa(None, states, states) != repeats


def test_the_simulation_repeats_grouped_heads_where_the_trainer_does() -> None:
    """In fp32, a GPU's trainer holds the keys and values of all heads."""
    config = {**FAMILIES["llama"], "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 300}
    layers, own = config["num_hidden_layers"], sdpa_attention.use_gqa_in_sdpa
    kept = {}
    for precision in ("fp32", "bf16"):
        recipe = Recipe(device="cuda", precision=precision)
        trace = Simulation(config, recipe, Depth(layers, layers, 0)).trace(2, 128)
        shapes = [block.size for block in trace.blocks]
        head = 2 * 128 * (config["hidden_size"] // 8) * (4 if precision == "fp32" else 2)
        kept[precision] = shapes.count(8 * head)
    assert kept["fp32"] > kept["bf16"]
    assert sdpa_attention.use_gqa_in_sdpa is own


@pytest.mark.usefixtures("restored")
def test_a_model_trains_with_deterministic_algorithms(tmp_path: Path) -> None:
    plain, strict = (create_run(tmp_path / name, make_spec(data=small_data())) for name in ("a", "b"))
    run_to_end(plain)
    device.use_deterministic_kernels()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    run_to_end(strict)
    ours, theirs = weights(strict), weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_operation_without_a_deterministic_way_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    error = RuntimeError(
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation."
    )
    failure = _crash(error, create_run(tmp_path / "run", make_spec()))
    assert failure.code == "not_deterministic"
    assert failure.permanent
    assert "cumsum_cuda_kernel" in failure.message


def test_deterministic_attention_in_fp32_is_planned_with_all_scores() -> None:
    spec = make_spec(deterministic=True)
    assert recipe_of(spec.model_copy(update={"precision": "no"}), GPU).attention == "eager"
    assert recipe_of(spec.model_copy(update={"precision": "bf16"}), GPU).attention == "sdpa"
    assert recipe_of(spec, Device("cpu", "CPU", 8 * GIB, "cpu")).attention == "sdpa"


@pytest.mark.parametrize("where", ["place_parameters", "check_head", "check_causality"])
def test_a_model_that_does_not_fit_ends_the_job_with_remedies(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, no smaller micro-batch can help."""

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(start, where, fails)
    with pytest.raises(CannotTrain, match=r"before the first step.*predicted peak for one sample") as failed:
        run_to_end(create_run(tmp_path / "run", make_spec(data=small_data())))
    assert failed.value.code == "out_of_memory"
