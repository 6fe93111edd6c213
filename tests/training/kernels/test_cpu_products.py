"""Products by oneDNN are those that PyTorch computes by itself, and are used where they are faster."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from app.contract.model_reference import LoraSpec
from app.contract.spec import MethodSpec
from tests.harness.any_family import lay_any
from tests.harness.runs import small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, interrupted_at, raw_log, run_to_end, weights
from workers.training.gradients import direct_sums
from workers.training.gradients.direct_sums import DirectSums
from workers.training.kernels import cpu_products
from workers.training.kernels.cpu_products import OneDnnProducts, suitable_shapes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """oneDNN computes the products with all weights, whatever the processor: their shapes."""
    computed, product = [], cpu_products._product

    def noted(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        computed.append(weight.shape)
        return product(rows, weight, bias)

    monkeypatch.setattr(cpu_products, "_product", noted)
    monkeypatch.setattr(cpu_products, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(cpu_products, "_LEAST_WORK", 0)
    monkeypatch.setattr(direct_sums, "LEAST_ELEMENTS", 1)
    return computed


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_products_are_those_of_pytorch(rows: int, has_bias: bool, is_transposed: bool) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(24, 40).t() if is_transposed else torch.randn(40, 24)
    states = torch.randn(rows, 24)
    bias = torch.randn(40) if has_bias else None
    products = OneDnnProducts(frozenset([(40, 24)]))
    torch.testing.assert_close(
        products.forward(states, weight, bias), nn.functional.linear(states, weight, bias)
    )
    again = [products.forward(states, weight, bias) for _ in range(2)]
    assert torch.equal(*again)


class Layers(nn.Module):
    def __init__(self, *, are_trained: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), Conv1D(6, 8)
        self.requires_grad_(are_trained)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(states))).square().sum()


@pytest.mark.parametrize("are_trained", [True, False])
@pytest.mark.parametrize("samples", [2, 0])
def test_the_gradient_is_that_of_autograd(are_trained: bool, samples: int) -> None:
    torch.manual_seed(0)
    layers, states = Layers(are_trained=are_trained), torch.randn(samples, 3, 6)
    found = []
    for shapes in (frozenset(), frozenset([(8, 6), (6, 8)])):
        direct = DirectSums(layers)
        direct.products = OneDnnProducts(shapes)
        own = states.clone().requires_grad_()
        layers.zero_grad()
        direct.begin(1.0)
        layers(own).backward()
        direct.end()
        found.append([own.grad, *(each.grad for each in layers.parameters() if are_trained)])
    torch.testing.assert_close(*found)
    assert all(each.grad is None for each in layers.parameters()) or are_trained


def test_an_output_head_is_left_out(tmp_path: Path) -> None:
    run = lay_any(tmp_path / "run", "llama", make_spec(data=small_data(), max_steps=1))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.assignment().model_path)
    shapes = DirectSums(model).shapes()
    assert sum(shapes.values()) == sum(type(each) is nn.Linear for each in model.model.modules())


def test_shapes_with_much_work_are_chosen() -> None:
    shapes = Counter({(768, 768): 8, (128, 128): 64, (2048, 768): 1})
    assert suitable_shapes(shapes, 512) == {(768, 768)}
    assert suitable_shapes(shapes, 1024) == {(768, 768), (2048, 768)}
    many = Counter({(4096, 4096 + number): 1 for number in range(20)})
    assert suitable_shapes(many, 1024) == {(4096, 4096 + number) for number in range(8, 20)}


def test_the_backward_pass_stays_with_pytorch(products: list[torch.Size]) -> None:
    """oneDNN is slower there on some processors, and its code for each size takes time."""
    layers, states = Layers(are_trained=True), torch.randn(2, 3, 6, requires_grad=True)
    direct = DirectSums(layers)
    direct.products = OneDnnProducts(frozenset([(8, 6), (6, 8)]))
    direct.begin(1.0)
    loss = layers(states)
    assert [tuple(shape) for shape in products] == [(8, 6), (6, 8)]
    loss.backward()
    direct.end()
    assert states.grad is not None
    assert len(products) == 2


_MANY_SIZES = """
import torch
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from workers.training.kernels import cpu_products

def resident():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024

weight, states = torch.randn(1024, 768), torch.randn(700, 768)
direct = SimpleNamespace(shapes=lambda: Counter({(1024, 768): 100}))
cpu_products._mkl_is_slow = lambda: True
cpu_products.may_replace_kernels = lambda *_: True
cpu_products.use_if_it_agrees = lambda *_: None
replica = SimpleNamespace(token_loss=SimpleNamespace(direct=direct), precision="fp32", kernels=())
cpu_products.choose_products(replica, None, None, SimpleNamespace(), None, 700, at_start=True)
cpu_products._product(states, weight, None)
before = resident()
for rows in range(300, 700):
    cpu_products._product(states[:rows], weight, None)
print(resident() - before)
"""


@pytest.mark.thorough
def test_many_sizes_of_micro_batches_take_little_memory() -> None:
    """Without a limit, each keeps code and workspace: here, 400 times half a mebibyte."""
    python = [sys.executable, "-c", _MANY_SIZES]
    grown = subprocess.run(python, capture_output=True, text=True, check=True, timeout=120).stdout
    assert float(grown) < 80


ADAPTERS = MethodSpec(name="lora", lora=LoraSpec(r=4, alpha=8, dropout=0.0, target_modules=None, merge=False))


@pytest.mark.parametrize("changes", [{}, {"method": ADAPTERS}], ids=["full", "lora"])
def test_a_job_uses_it_and_trains_the_same_up_to_rounding(
    tmp_path: Path, changes: dict[str, Any], products: list[torch.Size]
) -> None:
    logs = []
    for kernels in ("auto", "none"):
        (tmp_path / kernels).mkdir()
        spec = make_spec(data=small_data(), kernels=kernels, max_steps=6, certificate=True, **changes)
        run = lay_any(tmp_path / kernels / "run", "llama", spec)
        run_to_end(run)
        used = [each for each in events_of_kind(run, "kernels") if "oneDNN" in each["message"]]
        assert [each["data"]["used"] for each in used] == [True] * (kernels == "auto")
        logs.append(raw_log(run))
        assert bool(products) == (kernels == "auto")
        products.clear()
    for one, other in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_job_resumes_where_there_is_no_onednn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, products: list[torch.Size]
) -> None:
    spec = make_spec(data=small_data(), kernels="auto", max_steps=6)
    run = lay_any(tmp_path / "run", "llama", spec)
    interrupted_at(run, 9)
    assert products

    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("mkldnn has no _linear_pointwise")

    monkeypatch.setattr(cpu_products, "_product", missing)
    run_to_end(lay_any(tmp_path / "run", "llama", spec, attempt=2))
    assert len(raw_log(run)) == 6


def test_a_resumed_job_does_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, products: list[torch.Size]
) -> None:
    spec = make_spec(data=small_data(), kernels="auto", max_steps=6)
    whole = lay_any(tmp_path / "whole", "llama", spec)
    run_to_end(whole)
    halved = lay_any(tmp_path / "halved", "llama", spec)
    interrupted_at(halved, 9)
    assert 0 < len(raw_log(halved)) < 6
    assert any("oneDNN is used" in each["message"] for each in events_of_kind(halved, "kernels"))
    monkeypatch.setattr(cpu_products, "_mkl_is_slow", lambda: False)  # as on another machine
    products.clear()
    run_to_end(lay_any(tmp_path / "halved", "llama", spec, attempt=2))
    assert products
    assert all(torch.equal(one, weights(halved)[name]) for name, one in weights(whole).items())
