"""LoRA layers that add their product in place compute what peft's layers compute."""

from typing import Any

import pytest
import torch

from app.contract.model_reference import LoraSpec
from tests.harness.any_family import make_any, small_config
from workers.training.models import adapters
from workers.training.models.adapters import with_adapters

LORA = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)


def adapted(
    family: str, monkeypatch: pytest.MonkeyPatch, *, in_place: bool, dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Any:  # fmt: skip
    with monkeypatch.context() as patched:
        if not in_place:
            patched.setattr(adapters, "add_in_place", lambda _: None)
        torch.manual_seed(0)
        model = with_adapters(make_any(small_config(family)), LORA.model_copy(update={"dropout": dropout}), 0)
    if dtype == torch.float64:
        model.double()
    random = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first
            weight.data = torch.randn(weight.shape, generator=random, dtype=weight.dtype) * 0.05
    return model.train()


def gradients(model: Any, autocast: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, use_cache=False).logits
    logits.double().logsumexp(-1).sum().backward()
    found = [weight.grad.double().flatten() for weight in model.parameters() if weight.grad is not None]
    return logits.detach(), torch.cat(found)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_outputs_and_gradients_are_those_of_peft(
    family: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = adapted(family, monkeypatch, in_place=True, dropout=dropout)
    theirs = adapted(family, monkeypatch, in_place=False, dropout=dropout)
    assert sum("forward" in vars(module) for module in own.modules()) > 0
    for ours, expected in zip(gradients(own), gradients(theirs), strict=True):
        assert difference(ours, expected) < 1e-12


def test_autocast_gives_the_same_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    own = adapted("llama", monkeypatch, in_place=True, dtype=torch.float32)
    theirs = adapted("llama", monkeypatch, in_place=False, dtype=torch.float32)
    exact = adapted("llama", monkeypatch, in_place=False)
    _, ours = gradients(own, autocast=True)
    _, expected = gradients(theirs, autocast=True)
    _, true = gradients(exact)
    assert difference(ours, true) < 1.2 * difference(expected, true) + 1e-6


def test_adapters_can_still_be_disabled_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    own = adapted("llama", monkeypatch, in_place=True).eval()
    ids = torch.arange(3, 15).unsqueeze(0)
    with torch.no_grad():
        active = own(input_ids=ids, use_cache=False).logits
        with own.disable_adapter():
            disabled = own(input_ids=ids, use_cache=False).logits
        merged = own.merge_and_unload()
        plain = merged(input_ids=ids, use_cache=False).logits
    assert difference(disabled, active) > 1e-3
    assert difference(plain, active) < 1e-12
