"""Gradients of large weights that are added to their sums directly equal those of autograd."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.harness.runs import create_run, small_data
from tests.harness.small_models import CONFIGS
from tests.harness.specs import make_spec
from tests.harness.training import run_to_end
from workers.training.exceptions import CannotTrain
from workers.training.gradients import direct_sums
from workers.training.gradients.direct_sums import DirectSums
from workers.training.gradients.gradient_sums import InPlace
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import MicroBatch
from workers.training.models.trainable import recompute_activations
from workers.training.window import Clipping, LossScale, Window


class Layers(nn.Module):
    """One layer of each kind, and one that is used twice."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=padding)
        self.first = nn.Linear(6, 8)
        self.second = Conv1D(6, 8)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        hidden *= 0.5  # outputs may be changed in place
        hidden = hidden + self.first(hidden[0, 0]).sum()  # a vector alone, too
        grown = self.first(hidden)
        hidden = hidden + torch.relu_(grown)[..., :6]
        for _ in range(2):
            hidden = hidden + self.frozen(self.second(x=torch.tanh(self.first(input=hidden))))
        return hidden.square().sum()


def summed(model: nn.Module, batches: list[Tensor], *, directly: bool) -> dict[str, Tensor]:
    sums = InPlace(model.parameters(), DirectSums(model) if directly else None)
    sums.clear()
    sums.open(1.0)
    for batch in batches:
        model(batch).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sums.release()
    return found


@pytest.mark.parametrize("padding", [None, 3])
def test_each_kind_of_layer_has_the_gradient_of_autograd(padding: int | None) -> None:
    torch.manual_seed(0)
    model = Layers(padding).double()
    batches = [torch.randint(0, 11, (2, length)) for length in (5, 3, 7)]
    plain, direct = (summed(model, batches, directly=each) for each in (False, True))
    assert plain.keys() == direct.keys()
    for name, expected in plain.items():
        torch.testing.assert_close(direct[name], expected, rtol=1e-12, atol=1e-12)


def test_layers_are_their_own_again_after_a_window() -> None:
    model = Layers(None).double()
    direct = DirectSums(model)
    sums = InPlace(model.parameters(), direct)
    for _ in range(2):
        sums.open(1.0)
        assert "forward" in vars(model.first)
        sums.clear()
        assert "forward" not in vars(model.first)
    with direct.suspended():
        sums.open(1.0)
        assert "forward" not in vars(model.first)
        sums.clear()


def test_frozen_layers_and_those_of_other_kinds_are_left_to_autograd() -> None:
    class Scaled(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            return 2.0 * super().forward(given)

    hooked, wrapped = nn.Linear(4, 4), nn.Linear(4, 4)
    assert hooked.bias is not None
    hooked.bias.register_hook(lambda gradient: gradient * 2.0)
    own = wrapped.forward = lambda given: given
    model = nn.Sequential(
        nn.Linear(4, 4).requires_grad_(False), Scaled(4, 4), nn.Linear(4, 4).bfloat16(), hooked, wrapped
    )
    direct = DirectSums(model)
    direct.begin(1.0)
    assert [module for module in model if "forward" in vars(module)] == [wrapped]
    direct.end()
    assert wrapped.forward is own


def batch_of(ids: Tensor) -> MicroBatch:
    rows, length = ids.shape
    positions = torch.cat([torch.arange(length - 1) + row * length for row in range(rows)])
    return MicroBatch(
        input_ids=ids,
        target_positions=positions,
        targets=ids[:, 1:].flatten(),
        lengths=(length,) * rows,
        weights=torch.rand(len(positions)),
    )


@pytest.mark.parametrize("family", ["gpt2", "llama", "nanochat", "mixtral"])
@pytest.mark.parametrize("options", ["plain", "smoothing", "checkpointing", "bf16", "loss scale"])
def test_windows_of_models_have_the_gradient_of_autograd(family: str, options: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    bf16 = options == "bf16"
    model = model.float() if bf16 else model.double()
    model.train()
    if options == "checkpointing":
        recompute_activations(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    vocabulary = model.config.get_text_config().vocab_size
    batches = [batch_of(torch.randint(0, vocabulary, (2, length))) for length in (9, 5)]
    found = []
    for directly in (False, True):
        loss = TokenLoss(model, smoothing=0.1 if options == "smoothing" else 0.0)
        assert loss.head is not None
        loss.direct = DirectSums(model) if directly else None
        parameters = list(model.parameters())
        window = Window(
            parameters, torch.optim.SGD(parameters), Clipping(None),
            LossScale(64.0) if options == "loss scale" else None,
            gradients=InPlace(parameters, loss.direct),
        )  # fmt: skip
        window.open(7.0, len(batches))
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                forward = loss(batch)
            window.add(forward.loss_sum)
        found.append({name: window.gradient()[p].clone() for name, p in model.named_parameters()})
        window.abandon()
    plain, direct = found
    for name, expected in plain.items():
        error = float((direct[name] - expected).norm() / expected.norm().clamp(min=1e-30))
        assert error <= (1e-2 if bf16 else 1e-12), name


def test_the_comparison_before_the_first_step_finds_a_wrong_direct_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = direct_sums.add_product

    def wrong(weight: Tensor, left: Tensor, right: Tensor) -> None:
        honest(weight, left * 1.001, right)

    monkeypatch.setattr(direct_sums, "add_product", wrong)
    with pytest.raises(CannotTrain) as failed:
        run_to_end(
            create_run(
                tmp_path / "run", make_spec(data=small_data(), max_steps=2, epochs=None, certificate=True)
            )
        )
    assert failed.value.code == "not_equivalent"


def test_a_job_on_a_cpu_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    honest = direct_sums.add_product

    def counted(weight: Tensor, left: Tensor, right: Tensor) -> None:
        nonlocal calls
        calls += 1
        honest(weight, left, right)

    monkeypatch.setattr(direct_sums, "add_product", counted)
    run_to_end(create_run(tmp_path / "run", make_spec(data=small_data(), max_steps=2, epochs=None)))
    assert calls > 0
