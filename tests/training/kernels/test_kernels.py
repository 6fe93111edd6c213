"""Kernels of other packages are used only if they leave the gradient as it is. Here, functions play their
part, on a CPU."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from app.contract.plan import FixedSize
from tests.harness.runs import create_run, log_of, small_data
from tests.harness.small_models import make_model, make_window64
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, run_to_end, weights
from workers.run_directory import RunDirectory
from workers.training.kernels import selection
from workers.training.losses.loss import TokenLoss, boundaries
from workers.training.micro_batches.batches import MicroBatch
from workers.training.models.head import Head


def norms(model: Any) -> list[Any]:
    return [each for name, each in model.named_modules() if name.rpartition(".")[2].startswith("ln_")]


def replace_norms(model: Any, compute: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    for norm in norms(model):
        norm.__dict__["forward"] = compute.__get__(norm)


def same(norm: Any, states: torch.Tensor) -> torch.Tensor:
    scaled = (states - states.mean(-1, keepdim=True)) / (
        states.var(-1, correction=0, keepdim=True) + norm.eps
    ).sqrt()
    return scaled * norm.weight + norm.bias


def wrong(norm: Any, states: torch.Tensor) -> torch.Tensor:
    return 1.001 * same(norm, states)


def failing(norm: Any, states: torch.Tensor) -> torch.Tensor:
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton")


def killing(norm: Any, states: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def with_kernels(monkeypatch: pytest.MonkeyPatch, compute: Callable[..., torch.Tensor]) -> None:
    """Lets the trainer find a package whose norms are computed by a function."""

    def installed(replica: Any, spec: Any, *, packed: bool, longest: int) -> list[selection.Kernels]:
        model = replica.model
        return [selection.Patch("fast-norms 1.0", model, lambda: replace_norms(model, compute))]

    monkeypatch.setattr(selection, "installed_kernels", installed)


def trained(path: Path, attempt: int = 1) -> RunDirectory:
    spec = make_spec(data=small_data(), max_steps=4)
    run = create_run(path, spec, attempt=attempt, rule=FixedSize(samples=8))
    run_to_end(run)
    return run


def test_kernels_that_keep_the_gradient_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(tmp_path / "plain")
    calls = 0

    def counted(norm: Any, states: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return same(norm, states)

    with_kernels(monkeypatch, counted)
    run = trained(tmp_path / "run")
    [event] = events_of_kind(run, "kernels")
    assert event["data"]["used"]
    assert event["data"]["gradient_error"] < 1e-5
    assert "Fast-norms 1.0 is used" in event["message"]
    [banner] = [each["data"]["banner"] for each in events_of_kind(run, "training")]
    assert banner["kernels"] == "fast-norms 1.0"
    assert calls >= (1 + 4) * 5  # the five norms, in the comparison and in each step
    for one, other in zip(log_of(run), log_of(plain), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("compute", "why"), [(wrong, "changes the gradient"), (failing, "cannot be accessed")]
)
def test_other_kernels_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: Any, why: str
) -> None:
    plain = trained(tmp_path / "plain")
    with_kernels(monkeypatch, compute)
    run = trained(tmp_path / "run")
    [event] = events_of_kind(run, "kernels")
    assert not event["data"]["used"]
    assert event["level"] == "warning"
    assert why in event["message"]
    assert all(torch.equal(weight, weights(run)[name]) for name, weight in weights(plain).items())
    assert log_of(run) == log_of(plain)


def test_kernels_that_break_the_device_are_left_out_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels(monkeypatch, killing)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        trained(tmp_path / "run")
    run = trained(tmp_path / "run", attempt=2)
    [event] = events_of_kind(run, "kernels")
    assert "an earlier attempt ended" in event["message"]
    assert len(log_of(run)) == 4


def test_a_patch_can_be_switched_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gpt2")
    code = sys.modules[type(model).__module__]
    monkeypatch.setattr(code, "rotate", "own", raising=False)
    layer = norms(model)[0]

    def apply() -> None:
        layer.__dict__["forward"] = same.__get__(layer)
        layer.__dict__["eps"] = 0.5
        code.rotate = "theirs"  # type: ignore[attr-defined]
        code.new_name = 1  # type: ignore[attr-defined]

    eps = layer.eps
    patch = selection.Patch("package", model, apply)
    for _ in range(2):
        patch.switch_on()
        assert "forward" in vars(layer)
        assert layer.eps == 0.5
        assert (code.rotate, code.new_name) == ("theirs", 1)  # type: ignore[attr-defined]
        with selection.model_kernels([patch]):
            assert "forward" not in vars(layer)
            assert layer.eps == eps
            assert code.rotate == "own"
            assert not hasattr(code, "new_name")
        assert layer.eps == 0.5
        patch.switch_off()
        assert layer.eps == eps


def test_a_patch_that_fails_changes_nothing() -> None:
    model = make_model("gpt2")
    layer = norms(model)[0]

    def apply() -> None:
        layer.__dict__["forward"] = same
        raise ImportError("no Triton")

    patch = selection.Patch("package", model, apply)
    with pytest.raises(ImportError):
        patch.switch_on()
    assert "forward" not in vars(layer)


def a_replica(model: Any, **changes: Any) -> Any:
    """What kernels are chosen by, as if the model were on a GPU."""
    fields = {"device": torch.device("cuda"), "precision": "bf16", "model": model, "is_sharded": False,
              "token_loss": TokenLoss(model), **changes}  # fmt: skip
    return SimpleNamespace(**fields)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package like liger-kernel 0.8; returns the arguments of its calls."""
    calls: list[dict[str, Any]] = []
    package, inner, patches = (ModuleType(name) for name in ("liger_kernel", "transformers", "monkey_patch"))
    package.__spec__ = SimpleNamespace(name="liger_kernel")  # type: ignore[assignment]
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": object()}  # type: ignore[attr-defined]
    patches._apply_liger_kernel_to_instance = lambda model, **rest: calls.append(rest)  # type: ignore[attr-defined]
    inner.monkey_patch = patches  # type: ignore[attr-defined]
    package.transformers = inner  # type: ignore[attr-defined]
    for name, each in (("", package), (".transformers", inner), (".transformers.monkey_patch", patches)):
        monkeypatch.setitem(sys.modules, f"liger_kernel{name}", each)
    return calls


def test_liger_kernel_replaces_layers_but_not_the_loss(liger: list[dict[str, Any]]) -> None:
    replica = a_replica(make_model("llama"))
    [found] = selection.installed_kernels(
        replica, make_spec(kernels="auto", attention="eager"), packed=False, longest=9
    )
    assert found.name == "liger-kernel"
    found.switch_on()
    found.switch_off()
    found.switch_on()
    assert liger == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_rotary_embeddings_are_compiled_for_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def as_(name: str) -> Any:
        def apply(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append((name, len(query)))
            return query, key

        return apply

    apply = selection.for_few_numbers_of_rows(as_("kernel"), as_("own"))
    monkeypatch.setattr(selection, "_NUMBERS_OF_ROWS", 4)
    for rows in (1, 8, 1, 7, 6, 5, 8, 9, 1):
        states = torch.zeros(rows, 2, 3, 4)
        assert apply(states, states)[0] is states
    assert [name for name, _ in calls].count("own") == 2
    assert [rows for name, rows in calls if name == "own"] == [5, 9]


def test_the_patched_rotary_embeddings_are_those_of_liger_kernel(
    liger: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    own, taken = modeling_llama.apply_rotary_pos_emb, []

    def patch(model: Any, **rest: Any) -> None:
        def fast(query: Any, key: Any, cos: Any, sin: Any, **others: Any) -> Any:
            taken.append(len(query))
            return own(query, key, cos, sin, **others)

        modeling_llama.apply_rotary_pos_emb = fast

    monkeypatch.setattr(
        sys.modules["liger_kernel.transformers.monkey_patch"], "_apply_liger_kernel_to_instance", patch
    )
    model = make_model("llama")
    [found] = selection.installed_kernels(
        a_replica(model), make_spec(kernels="auto", attention="eager"), packed=False, longest=9
    )
    found.switch_on()
    for rows in range(1, 15):
        model(input_ids=torch.zeros(rows, 3, dtype=torch.long))
    found.switch_off()
    assert modeling_llama.apply_rotary_pos_emb is own
    assert sorted(set(taken)) == list(range(1, 13))


@pytest.mark.parametrize(
    ("spec", "replica"),
    [
        ({"kernels": "none"}, {}),
        ({"compile": True}, {}),
        ({"deterministic": True}, {}),
        ({}, {"device": torch.device("cpu")}),
        ({}, {"is_sharded": True}),
        ({}, {"model": make_model("gpt2")}),
    ],
)
def test_liger_kernel_is_left_out_where_it_cannot_help(
    liger: list[dict[str, Any]], spec: dict[str, Any], replica: dict[str, Any]
) -> None:
    chosen = make_spec(**{"kernels": "auto", "attention": "eager", **spec})
    assert not selection.installed_kernels(
        a_replica(**{"model": make_model("llama"), **replica}), chosen, packed=False, longest=9
    )


@pytest.mark.parametrize(
    ("capability", "precision", "packed", "installed", "expected"),
    [
        ((9, 0), "bf16", False, {2, 3}, "flash_attention_3"),
        ((9, 0), "bf16", True, {2}, "flash_attention_2"),
        ((8, 0), "fp16", True, {2, 3}, "flash_attention_2"),
        ((8, 0), "fp16", False, {2}, None),
        ((7, 5), "fp16", True, {2}, None),
        ((9, 0), "fp32", True, {2, 3}, None),
        ((9, 0), "bf16", True, set(), "accrue_varlen"),
        ((8, 0), "fp16", True, {3}, "accrue_varlen"),
        ((9, 0), "bf16", False, set(), None),
        ((7, 5), "fp16", True, set(), None),
    ],
)
def test_flash_attention_is_chosen_by_the_device_and_the_rows(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    precision: str,
    packed: bool,
    installed: set[int],
    expected: str | None,
) -> None:
    from transformers.utils import import_utils

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    for generation in (2, 3):
        there = generation in installed
        monkeypatch.setattr(import_utils, f"is_flash_attn_{generation}_available", lambda there=there: there)
    replica = a_replica(make_model("llama"), precision=precision)
    chosen: list[str] = []

    def choose(implementation: str) -> None:
        chosen.append(implementation)
        replica.model.config._attn_implementation = implementation

    replica.model.set_attn_implementation = choose
    found = selection.installed_kernels(replica, make_spec(kernels="auto"), packed=packed, longest=9)
    for each in found:
        each.switch_on()
        assert replica.token_loss.passes_boundaries
    assert chosen == ([] if expected is None else [expected])


def test_a_model_that_does_not_support_flash_attention_says_so() -> None:
    """As transformers does for models that choose their attention when they are built: it only logs that."""
    replica = a_replica(make_model("llama"))
    replica.model.set_attn_implementation = lambda _: None
    with pytest.raises(NotImplementedError, match="cannot be flash_attention_2"):
        selection.BoundaryAttention(replica, "flash_attention_2", "flash-attn").switch_on()


def test_flash_attention_is_told_where_samples_begin() -> None:
    ids = torch.arange(12)[None]
    batch = MicroBatch(ids, ids[0], ids[0], (3, 4, 5), position_ids=ids)
    found = boundaries(batch)
    assert found["cu_seq_lens_q"].tolist() == [0, 3, 7, 12] == found["cu_seq_lens_k"].tolist()
    assert found["cu_seq_lens_q"].dtype == torch.int32
    assert found["max_length_q"] == found["max_length_k"] == 5


def test_the_mark_of_a_comparison_stays_only_if_it_ends_the_process(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with run.comparing_kernels(0):
        assert run.was_ended_while_comparing_kernels(0)
        assert not run.was_ended_while_comparing_kernels(1)
    assert not run.was_ended_while_comparing_kernels(0)
    with pytest.raises(RuntimeError), run.comparing_kernels(1):
        raise RuntimeError
    assert run.was_ended_while_comparing_kernels(1)


def pretend_fused(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, *, scale: float,
    smoothing: float, with_gradient: bool,
) -> torch.Tensor:  # fmt: skip
    """What the kernel of fused_cross_entropy.py computes, by other means."""
    with torch.enable_grad():
        scaled = logits.detach().float().requires_grad_()
        losses = F.cross_entropy(scaled * scale, targets, reduction="none", label_smoothing=smoothing)
        losses = losses if weights is None else losses * weights
        if with_gradient:
            (found,) = torch.autograd.grad(losses.sum(), scaled)
    if with_gradient:
        logits.copy_(found)
    return losses.detach()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_fused_loss_gives_the_gradient_of_the_plain_one(
    family: str, weighted: bool, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Head, "rows", property(lambda _: 50))  # several chunks
    model = make_model(family)
    batch = make_window64().batch(list(range(12)), weighted=weighted)
    found = []
    for fused in (pretend_fused, None):
        loss = TokenLoss(model, smoothing=smoothing)
        loss.fused = fused
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            summed = loss(batch).loss_sum
        summed.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((float(summed.detach()), gradient.double()))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            assert float(loss(batch).loss_sum) == pytest.approx(found[-1][0], rel=1e-6)
    (ours, own), (theirs, plain) = found
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert float((own - plain).norm() / plain.norm()) < 5e-3


def test_the_fused_loss_is_offered_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    token_loss = TokenLoss(make_model("gpt2"))
    replica: Any = SimpleNamespace(token_loss=token_loss, precision="bf16")
    monkeypatch.setattr(selection.importlib.util, "find_spec", lambda name: name == "triton" or None)
    offered = selection._fused_loss(replica)
    assert offered is not None
    assert "cross-entropy" in offered.name
    monkeypatch.setitem(
        sys.modules, "workers.training.kernels.fused_cross_entropy", module("f", cross_entropy=pretend_fused)
    )
    offered.switch_on()
    assert token_loss.fused is pretend_fused
    offered.switch_off()
    assert token_loss.fused is None
    replica.precision = "fp16"  # its products need a scale of their own
    assert selection._fused_loss(replica) is None
    replica.precision = "bf16"
    token_loss.head = replace(token_loss.head, cap=30.0)  # type: ignore[type-var]
    assert selection._fused_loss(replica) is None
    token_loss.head = None
    assert selection._fused_loss(replica) is None


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    return made
