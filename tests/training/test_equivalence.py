"""Random combinations of family, method and options: no split changes the gradient.

Hypothesis chooses among families × methods × options × splits; the reference is the whole batch in one
forward, padded, without any of the options that only save time or memory.
"""

import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.contract.model_reference import LoraSpec
from app.contract.plan import FixedCount, FixedSize, MicroBatchRule, TokenBudget
from tests.harness.small_models import CONFIGS, Window64, make_model, promised
from workers.training.gradients.direct_sums import Products
from workers.training.gradients.gradient_sums import InPlace, SeparateAccumulator
from workers.training.losses.chunked_loss import ChunkedLoss
from workers.training.losses.load_balancing_loss import load_balancing_loss_of
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import Groups, cut_window
from workers.training.models import head as heads
from workers.training.models.adapters import with_adapters
from workers.training.models.trainable import recompute_activations
from workers.training.window import Window

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
PACKABLE = ("gpt2", "llama", "mixtral", "nanochat")
"""OPT's attention does not keep packed samples apart; the trainer finds that out and pads."""


@dataclass(frozen=True)
class Setting:
    """What is trained (the loss and its parameters), and how."""

    family: str
    dtype: torch.dtype
    lora: bool = False
    smoothing: float = 0.0
    weighted: bool = False
    aux_scope: str = "window"
    checkpointing: bool = False
    chunked: bool = False
    chunk: int = 10**9
    packed: bool = False
    on_cpu: bool = False

    @property
    def reference(self) -> "Setting":
        """The same loss of the same parameters, plainly."""
        return Setting(self.family, self.dtype, self.lora, self.smoothing, self.weighted, self.aux_scope)


@cache
def model_of(family: str, dtype: torch.dtype, lora: bool, checkpointing: bool) -> Any:
    model = make_model(family, dtype)
    if lora:
        with warnings.catch_warnings(action="ignore"):  # peft on what is no linear layer
            lora_spec = LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False)
            model = with_adapters(model, lora_spec, seed=1).to(dtype)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():  # B begins at zero, where A would have no gradient
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.1)
    if checkpointing:
        recompute_activations(model)
    return model.train()


def gradient(setting: Setting, data: Window64, groups: Groups) -> Tensor:
    """The gradient that a window leaves, as one vector."""
    model = model_of(setting.family, setting.dtype, setting.lora, setting.checkpointing)
    parameters = [p for p in model.parameters() if p.requires_grad]
    balance = load_balancing_loss_of(model, setting.aux_scope)  # type: ignore[arg-type]
    token_loss = TokenLoss(
        model, smoothing=setting.smoothing, chunked=setting.chunked, routed=balance is not None
    )
    kept: Any = (
        SeparateAccumulator(parameters, host=torch.device("cpu")) if setting.on_cpu else InPlace(parameters)
    )
    window = Window(parameters, torch.optim.SGD(parameters, lr=0.0), gradients=kept)
    batches = [
        data.batch(group, weighted=setting.weighted, packed=setting.packed, routed=balance is not None)
        for group in groups
    ]
    if balance is not None:
        balance.begin(len(data.rows))
        for batch in batches if balance.scope == "window" else []:
            balance.observe(token_loss.router_logits(batch), batch)
    window.open(data.weighted_targets if setting.weighted else data.targets)
    for batch in batches:
        forward = token_loss(batch)
        window.add(forward.loss_sum, balance.share(forward.router_logits, batch) if balance else None)
    found = window.gradient()
    whole = torch.cat(
        [found[p].flatten() if p in found else torch.zeros_like(p).flatten() for p in parameters]
    )
    window.abandon()
    if isinstance(kept, SeparateAccumulator):
        kept.release()
    return whole.clone()


_references: dict[Setting, Tensor] = {}


def whole_batch(setting: Setting, data: Window64) -> Tensor:
    plain = setting.reference
    if plain not in _references:
        _references[plain] = gradient(plain, data, [list(range(64))])
    return _references[plain]


cuts: st.SearchStrategy[MicroBatchRule] = st.one_of(
    st.builds(TokenBudget, tokens=st.integers(60, 700)),
    st.builds(FixedCount, micro_batches=st.integers(2, 64)),
    st.builds(FixedSize, samples=st.integers(1, 32)),
)
chosen_settings = st.builds(
    Setting,
    family=st.sampled_from(sorted(CONFIGS)),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    lora=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    aux_scope=st.sampled_from(["window", "sequence", "none"]),
    checkpointing=st.booleans(),
    chunked=st.booleans(),
    chunk=st.sampled_from([1, 10**9]),
    packed=st.booleans(),
    on_cpu=st.booleans(),
)


def small_chunks(monkeypatch: pytest.MonkeyPatch, setting: Setting) -> None:
    """Chunks of seven positions, so that a small window has many."""
    monkeypatch.setattr(heads, "rows_of_chunk", lambda vocabulary, _: max(7, setting.chunk // vocabulary))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(setting=chosen_settings, cut=cuts, seed=st.integers(0, 9))
def test_no_split_no_method_and_no_option_changes_the_gradient(
    setting: Setting, cut: MicroBatchRule, seed: int, window64: Window64, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting.family not in PACKABLE:
        setting = replace(setting, packed=False)
    if not promised(setting.family, setting.dtype):
        setting = replace(setting, dtype=torch.float64)
    small_chunks(monkeypatch, setting)
    groups = cut_window(
        window64.lengths, cut, packed=setting.packed, first=np.random.default_rng(seed) if seed % 2 else None
    )
    whole = whole_batch(setting, window64)
    split = gradient(setting, window64, groups)
    event(f"{setting.family} {setting.dtype}")
    assert float((split - whole).norm() / whole.norm()) <= TOLERANCE[setting.dtype]


def chunked_loss(
    hidden: Tensor, layer: torch.nn.Linear, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """The summed loss of a plain output head without a bias, with the gradients of states and weight."""
    head, wanted = heads.Head(layer, 1.0, None), (True, True, False)
    found: Tensor = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, layer.weight, None, targets, weights, 0.0, head, dtype, None, None, Products(), wanted
    )
    return found


@pytest.mark.parametrize("heaviest", [1.0, 1000.0])
def test_the_chunked_loss_keeps_within_fp16s_range(heaviest: float) -> None:
    """Many positions of the same few tokens in one chunk, and weights up to the largest allowed."""
    torch.manual_seed(0)
    count, width, vocabulary = 8000, 16, 60
    hidden = torch.randn(count, width).abs().requires_grad_()
    layer = torch.nn.Linear(width, vocabulary, bias=False)
    weight = layer.weight
    torch.nn.init.normal_(weight, std=0.02)
    targets, weights = torch.randint(0, 3, (count,)), torch.rand(count) * heaviest

    def gradients(dtype: torch.dtype) -> Tensor:
        hidden.grad = weight.grad = None
        (chunked_loss(hidden, layer, targets, weights, dtype) / weights.sum()).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return torch.cat([hidden.grad.flatten(), weight.grad.flatten()]).double()

    exact, half = gradients(torch.float32), gradients(torch.float16)
    assert bool(half.isfinite().all())
    assert float((half - exact).norm() / exact.norm()) <= 1e-2


@pytest.mark.parametrize("count", [0, 8])
def test_fp16_loss_and_gradients_are_zero_for_zero_weights_or_no_targets(count: int) -> None:
    hidden = torch.randn(count, 16, requires_grad=True)
    layer = torch.nn.Linear(16, 60, bias=False)
    weight = layer.weight
    targets, weights = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
    total = chunked_loss(hidden, layer, targets, weights, torch.float16)
    total.backward()
    assert total.item() == 0.0
    assert weight.grad is not None
    assert bool((weight.grad == 0).all())


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "changes",
    [
        {"smoothing": 0.1, "chunked": True, "chunk": 1},
        {"lora": True},
        {"checkpointing": True},
        {"chunked": True, "chunk": 1},
        {"packed": True},
        {"on_cpu": True},
        {"aux_scope": "sequence"},
        {"weighted": True, "chunked": True, "chunk": 1},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_each_option_of_each_family_alone(
    family: str, changes: dict[str, Any], window64: Window64, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hypothesis may pass over: every option once with every family, in fp64."""
    if "packed" in changes and family not in PACKABLE:
        pytest.skip("OPT's attention does not keep packed samples apart")
    setting = Setting(family, torch.float64, **changes)
    small_chunks(monkeypatch, setting)
    groups = cut_window(window64.lengths, TokenBudget(tokens=200), packed=setting.packed)
    whole = whole_batch(setting, window64)
    split = gradient(setting, window64, groups)
    assert float((split - whole).norm() / whole.norm()) <= 1e-12
