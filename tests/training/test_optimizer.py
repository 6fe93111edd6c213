"""An optimizer with its states in host memory gives the same results as one on the device."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from app.contract.memory_profile import Recipe
from app.contract.spec import OptimizerName
from app.planning.architectures import named
from app.planning.memory import step_memory
from tests.harness.any_family import make_any, small_config
from tests.harness.specs import make_optimizer as make_optimizer_spec
from workers.training.checkpoints import checkpoint
from workers.training.checkpoints.state import Progress, RunState
from workers.training.models.parameters import Parameters
from workers.training.optimizer import OnHost, biases_and_gains, make_optimizer, set_rate

CPU = torch.device("cpu")
NAMES = [name for name in get_args(OptimizerName) if name != "adamw_8bit"]


def save(folder: Path, state: RunState, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path | None:
    return checkpoint.save(folder, state, checkpoint.collect(Parameters(model), optimizer))


def restore(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[RunState | None, list[str]]:
    return checkpoint.restore(folder, Parameters(model), optimizer)


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def train(trained: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_rate(optimizer, 0.01 / (step + 1))
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        trained(inputs).square().sum().backward()
        optimizer.step()
        for parameter in trained.parameters():
            parameter.grad = None


def weights(trained: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trained.parameters()])


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_on_the_host_is_bit_exact_and_resumes(name: OptimizerName, tmp_path: Path) -> None:
    spec = make_optimizer_spec(name)
    plain, moved, resumed = model(), model(), model()
    beside = make_optimizer(spec, plain.parameters())
    on_host = make_optimizer(spec, moved.parameters(), CPU)
    assert isinstance(on_host, OnHost)
    train(plain, beside, range(6))
    train(moved, on_host, range(3))
    state = RunState(Progress(step=3))
    save(tmp_path, state, moved, on_host)
    train(moved, on_host, range(3, 6))
    assert torch.equal(weights(plain), weights(moved))
    again = make_optimizer(spec, resumed.parameters(), CPU)
    assert restore(tmp_path, resumed, again)[0] == state
    train(resumed, again, range(3, 6))
    assert torch.equal(weights(plain), weights(resumed))


def test_predicted_gpu_memory_excludes_offloaded_optimizer_states() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    recipe = Recipe(device="cuda", precision="bf16")
    beside = step_memory(gpt2, recipe, 4, 512)
    moved = step_memory(gpt2, recipe.model_copy(update={"optimizer_on_cpu": True}), 4, 512)
    assert (moved.optimizer_bytes, beside.optimizer_bytes) == (0, gpt2.parameters * 8)
    assert moved.gradients_bytes == beside.gradients_bytes


@pytest.mark.parametrize("family", ["gpt_oss", "cohere"])
def test_biases_and_gains_have_no_weight_decay_whatever_their_shape(family: str) -> None:
    config = small_config(family)
    if family == "cohere":
        config.use_qk_norm = True
    made = make_any(config)
    named = dict(made.named_parameters())
    undecayed = {named[name] for name in biases_and_gains(made)}
    spec = make_optimizer_spec("adamw").model_copy(update={"weight_decay": 0.1})
    optimizer = make_optimizer(spec, made.parameters(), undecayed=undecayed)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in named.items():
        plain = parameter.ndim < 2 or name.endswith("bias") or "norm" in name
        assert (decays[parameter] == 0.0) == plain, name
    assert any(parameter.ndim > 1 for parameter in undecayed), "the case that this test is about"


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_may_get_its_first_gradient_late(name: OptimizerName) -> None:
    """As with LayerDrop, which leaves layers out of some steps."""
    own = model()
    spec = make_optimizer_spec(name)
    if spec.momentum is not None:
        spec = spec.model_copy(update={"momentum": 0.9})
    optimizer = make_optimizer(spec, own.parameters())
    for used in (own[:1], own, own[1:], own):
        own.zero_grad(set_to_none=True)
        inputs = torch.ones(4, 5 if used is not own and used[0] is own[1] else 6)
        used(inputs).square().sum().backward()
        optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in own.parameters())
