"""Samples are laid out without padding where attention is computed sample by sample, as here on a CPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from app.contract.plan import FixedSize, TokenBudget
from app.contract.spec import RampSpec, ValidationSpec
from tests.harness.any_family import lay_any, make_any, make_tokenizer, small_config
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from tests.harness.training import events_of_kind, interrupted_at, raw_log, run_to_end, weights
from workers.run_directory import RunDirectory
from workers.training.checks import packing_check
from workers.training.kernels import sample_groups, selection, unpadded, varlen_attention
from workers.training.kernels.selection import BoundaryAttention
from workers.training.micro_batches import trial_policy

RULE = TokenBudget(tokens=600)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of each sample, for narrow models too."""
    monkeypatch.setattr(unpadded, "LEAST_WIDTH_ON_CPU", 0)


def spec_of(**changes: Any) -> Any:
    return make_spec(**{"data": small_data(), "max_steps": 6, "kernels": "auto", **changes})


def padded_and_unpadded(tmp_path: Path, **changes: Any) -> tuple[RunDirectory, RunDirectory]:
    plain = create_run(tmp_path / "plain", spec_of(**{**changes, "kernels": "none"}), rule=RULE)
    own = create_run(tmp_path / "own", spec_of(**changes), rule=RULE)
    run_to_end(plain)
    run_to_end(own)
    return plain, own


def tokens_without_padding(run: RunDirectory) -> bool:
    return all(line["padded_tokens"] == line["tokens"] for line in raw_log(run))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_checkpointing": True}, {"certificate": True}, {"label_smoothing": 0.1}],
    ids=str,
)
def test_training_is_the_same_without_padding(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain, own = padded_and_unpadded(tmp_path, **changes)
    assert events_of_kind(own, "unpadded")
    assert not events_of_kind(plain, "unpadded")
    ours, theirs = raw_log(own), raw_log(plain)
    for one, other in zip(ours, theirs, strict=True):
        assert (one["samples"], one["tokens"]) == (other["samples"], other["tokens"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert ours[-1]["micro_step"] < theirs[-1]["micro_step"]
    for certificate in events_of_kind(own, "certificate"):
        assert certificate["data"]["gradient_error"] < 1e-5


@pytest.mark.usefixtures("kernel")
def test_grouped_heads_and_evaluations_are_computed_without_padding(tmp_path: Path) -> None:
    data = small_data(validation=ValidationSpec(file_id=None, sha256=None, format=None, share=0.2))
    losses = []
    for kernel in ("none", "auto"):
        folder = tmp_path / kernel
        folder.mkdir()
        run = lay_any(folder / "run", "llama", spec_of(data=data, eval_every=2, kernels=kernel), rule=RULE)
        run_to_end(run)
        assert bool(events_of_kind(run, "unpadded")) is (kernel == "auto")
        losses.append([event["data"]["loss"] for event in events_of_kind(run, "evaluation")])
    assert losses[0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.usefixtures("kernel")
def test_a_stopped_run_goes_on_without_padding(tmp_path: Path) -> None:
    whole = create_run(tmp_path / "whole", spec_of(), rule=RULE)
    run_to_end(whole)
    stopped = create_run(tmp_path / "stopped", spec_of(), rule=RULE)
    interrupted_at(stopped, 5)
    run_to_end(create_run(tmp_path / "stopped", spec_of(), rule=RULE, attempt=2))
    ours, theirs = weights(stopped), weights(whole)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("asked", ["none", "auto"])
def test_padding_stays_where_it_belongs_to_the_request(tmp_path: Path, asked: str) -> None:
    """A split that was requested, or kernels that were declined."""
    rule = RULE if asked == "none" else FixedSize(samples=4)
    run = create_run(tmp_path / "run", spec_of(kernels=asked), rule=rule)
    run_to_end(run)
    assert not events_of_kind(run, "unpadded")


def test_a_kernel_that_changes_the_gradient_is_not_used(
    tmp_path: Path, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = varlen_attention.within_samples

    def mixing(query: Any, key: Any, value: Any, begins: Any, *_: Any) -> torch.Tensor:
        """Attention over the whole row."""
        return honest(query, key, value, begins[[0, -1]], int(begins[-1]), None)

    monkeypatch.setattr(varlen_attention, "within_samples", mixing)
    plain, own = padded_and_unpadded(tmp_path)
    assert not events_of_kind(own, "unpadded")
    [event] = events_of_kind(own, "kernels")
    assert "not used: it changes the gradient" in event["message"]
    assert [line["loss"] for line in raw_log(own)] == [line["loss"] for line in raw_log(plain)]


def test_a_model_that_mixes_samples_stays_padded(
    tmp_path: Path, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpadded, "why_not_packed", lambda *_: "The model mixes samples.")
    plain, own = padded_and_unpadded(tmp_path)
    [event] = events_of_kind(own, "unpadded")
    assert event["message"] == "Samples are padded. The model mixes samples."
    assert event["data"]["used"] is False
    assert not events_of_kind(own, "changed")  # packing was not requested
    assert [line["loss"] for line in raw_log(own)] == [line["loss"] for line in raw_log(plain)]


@pytest.mark.usefixtures("kernel")
def test_rows_are_no_longer_than_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpadded, "LONGEST_ROW", 150)
    _, own = padded_and_unpadded(tmp_path)
    assert events_of_kind(own, "unpadded")
    assert max(line["largest_tokens"] for line in raw_log(own)) <= 150


class Config:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def get_text_config(self) -> "Config":
        return self


@pytest.mark.parametrize(
    ("fields", "longest", "suits"),
    [
        ({}, 5000, True),
        ({"sliding_window": 4096}, 4096, True),
        ({"sliding_window": 4096}, 4097, False),
        ({"sliding_window": None, "layer_types": ["full_attention"]}, 5000, True),
        ({"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}, 100, True),
        ({"layer_types": ["chunked_attention"]}, 10, False),
        ({"layer_types": ["linear_attention", "full_attention"]}, 10, False),
        ({"attention_chunk_size": 8192}, 10, False),
        ({"attn_logit_softcapping": 50.0}, 10, False),
        ({"attn_pdrop": 0.1}, 10, False),
        ({"attention_dropout": 0.0}, 10, True),
        ({"sliding_window": [4096, 4096]}, 10, False),
        ({"layer_types": [["full_attention"]]}, 10, False),
    ],
    ids=str,
)
def test_only_plainly_causal_attention_suits(fields: dict[str, Any], longest: int, suits: bool) -> None:
    assert varlen_attention.suits(Config(**fields), longest) is suits


def test_other_attention_is_refused() -> None:
    module, states = torch.nn.Module(), torch.zeros(1, 2, 6, 8)
    begins = torch.tensor([0, 2, 6], dtype=torch.int32)
    for others in ({"softcap": 30.0}, {"s_aux": states}):
        with pytest.raises(NotImplementedError):
            varlen_attention.attention(
                module, states, states, states, None, cu_seq_lens_q=begins, max_length_q=4, **others
            )
    with pytest.raises(NotImplementedError):
        varlen_attention.attention(module, states, states, states, torch.ones(1, 1, 6, 6))
    assert varlen_attention.is_supported(states)
    assert not varlen_attention.is_supported(torch.zeros(1, 2, 6, 4))
    assert not varlen_attention.is_supported(torch.zeros(1, 2, 6, 264))


def test_without_packed_rows_each_row_is_one_sample() -> None:
    query, key, value = torch.randn(3, 2, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    found, _ = varlen_attention.attention(torch.nn.Module(), query, key, value, None)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    assert np.allclose(found.numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.usefixtures("kernel")
def test_a_kernel_of_padded_rows_is_compared_again_on_packed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flash-attn 3 on Hopper, which is used for all rows; here, it is wrong for packed ones."""

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
            return states.clone()

        @staticmethod
        def backward(ctx: Any, *outer: torch.Tensor) -> torch.Tensor:
            return 3 * outer[0]

    honest = varlen_attention.within_samples
    monkeypatch.setattr(varlen_attention, "within_samples", lambda *given: Tripled.apply(honest(*given)))

    def installed(replica: Any, spec: Any, *, packed: bool, longest: int) -> list[Any]:
        varlen_attention.register()
        return [BoundaryAttention(replica, varlen_attention.NAME, "fast")] if spec.kernels == "auto" else []

    monkeypatch.setattr(selection, "installed_kernels", installed)
    plain, own = padded_and_unpadded(tmp_path)
    used, not_used = events_of_kind(own, "kernels")
    assert used["data"]["used"]
    assert not not_used["data"]["used"]
    [event] = events_of_kind(own, "unpadded")
    assert event["message"] == "Samples are padded. fast is used for padded rows only."
    for one, other in zip(raw_log(own), raw_log(plain), strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.usefixtures("kernel")
def test_too_little_memory_for_the_check_leaves_samples_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packing_check, "_errors", failing)
    _, own = padded_and_unpadded(tmp_path)
    [event] = events_of_kind(own, "unpadded")
    assert event["message"].startswith("Samples are padded. There is too little memory")


@pytest.mark.usefixtures("kernel")
def test_a_run_killed_in_the_check_goes_on_as_if_it_was_not(tmp_path: Path) -> None:
    """On a CPU, a resumed run equals others to the bit; only a GPU's kernels are left out after that."""
    whole = create_run(tmp_path / "whole", spec_of(), rule=RULE)
    run_to_end(whole)
    run = create_run(tmp_path / "run", spec_of(), rule=RULE)
    with pytest.raises(RuntimeError), run.comparing_kernels(0):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert run.was_ended_while_comparing_kernels(0)
    run_to_end(run)
    assert events_of_kind(run, "unpadded")
    ours, theirs = weights(run), weights(whole)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("first", ["used", "not used"])
def test_a_resumed_run_keeps_its_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Whatever a comparison with other weights would find."""

    def found(answer: str | None) -> None:
        monkeypatch.setattr(unpadded, "why_not_packed", lambda *_: answer)

    found(None if first == "used" else "The model mixes samples.")
    run = create_run(tmp_path / "run", spec_of(), rule=RULE)
    interrupted_at(run, 5)
    found("The model mixes samples." if first == "used" else None)
    run_to_end(create_run(tmp_path / "run", spec_of(), rule=RULE, attempt=2))
    packed = [line["padded_tokens"] == line["input_tokens"] for line in raw_log(run)]
    assert packed == [first == "used"] * len(packed)


@pytest.mark.usefixtures("kernel")
def test_rows_are_checked_that_a_growing_batch_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    honest = unpadded.why_not_packed

    def noted(*given: Any) -> str | None:
        asked.append(given[4])
        return honest(*given)

    monkeypatch.setattr(unpadded, "why_not_packed", noted)
    ramp = RampSpec(
        name="noise_scale", warmup_steps=0, loss_variance_threshold=0.01, max_effective_batch_size=30
    )
    run_to_end(create_run(tmp_path / "run", spec_of(ramp=ramp, noise_scale_every=1), rule=RULE))
    assert asked == [30]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kernels", ["auto", "none"])
def test_micro_batches_without_padding_have_their_own_budget(tmp_path: Path, kernels: str) -> None:
    rule = TokenBudget(tokens=100, unpadded_tokens=240)
    spec = spec_of(kernels=kernels, max_steps=2, tune="while_training")
    run = create_run(tmp_path / "run", spec, rule=rule)
    run_to_end(run)
    own = raw_log(run)
    tokens = sum(line["input_tokens"] for line in own)
    micro_batches = sum(line["gradient_accumulation_steps"] for line in own)
    assert bool(events_of_kind(run, "unpadded")) is (kernels == "auto")
    assert (tokens / micro_batches > 100) is (kernels == "auto")


@pytest.mark.usefixtures("kernel")
def test_sizes_are_tried_up_to_the_longest_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpadded, "LONGEST_ROW", 200)
    monkeypatch.setattr(trial_policy, "WORTH_TRYING", 2)
    run = create_run(tmp_path / "run", spec_of(max_steps=40, tune="while_training"), rule=RULE)
    run_to_end(run)
    [event] = events_of_kind(run, "tuned")
    assert max(each["token_budget"] for each in event["data"]["tried"]) <= 200
    assert run.tuning()[-1].state["planned"] == 200


@pytest.mark.usefixtures("kernel")
def test_attention_with_dropout_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config may have another name for it."""
    monkeypatch.setattr(varlen_attention, "_DROPOUTS", ())
    config = small_config("llama")
    config.attention_dropout = 0.2
    make_any(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    run = lay_any(tmp_path / "run", "llama", spec_of(), rule=RULE)
    run_to_end(run)
    assert events_of_kind(run, "unpadded")
    assert len(raw_log(run)) == 6


def test_on_a_cpu_only_wide_models_that_are_quickly_checked_have_no_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpadded, "LEAST_WIDTH_ON_CPU", 129)  # the model has a width of 128
    narrow = create_run(tmp_path / "narrow", spec_of(), rule=RULE)
    run_to_end(narrow)
    assert not events_of_kind(narrow, "unpadded")
    monkeypatch.setattr(unpadded, "LEAST_WIDTH_ON_CPU", 128)
    wide = create_run(tmp_path / "wide", spec_of(), rule=RULE)
    run_to_end(wide)
    assert events_of_kind(wide, "unpadded")
    monkeypatch.setattr(unpadded, "_MOST_OPERATIONS_ON_CPU", 1e6)
    large = create_run(tmp_path / "large", spec_of(), rule=RULE)
    run_to_end(large)
    assert not events_of_kind(large, "unpadded")


@pytest.mark.parametrize(
    ("weights", "longest", "planned", "tuned", "row"),
    [
        (10**6, 64, 4096, True, 4096),
        (10**6, 64, 2**20, True, 2**14),
        (10**8, 64, 4096, True, 1666),  # what 1e12 operations allow
        (10**8, 1500, 1024, True, 1500),
        (10**8, 2000, 4096, True, None),
        (10**9, 64, 4096, True, None),
        (10**9, 64, 100, True, 100),
        (3 * 10**8, 64, 2048, True, None),
        (3 * 10**8, 64, 768, False, 555),
        (3 * 10**8, 600, 768, False, None),
        (4 * 10**8, 64, 768, False, None),
    ],
)
def test_rows_on_a_cpu_are_as_long_as_can_be_checked_quickly(
    weights: int, longest: int, planned: int, tuned: bool, row: int | None
) -> None:
    model = torch.nn.Linear(weights // 10, 10, bias=False, device="meta")
    on_cpu = SimpleNamespace(device=torch.device("cpu"), model=model)
    assert unpadded._longest_row(on_cpu, longest, planned, is_tuned=tuned) == row  # type: ignore[arg-type]
    on_gpu = SimpleNamespace(device=torch.device("cuda"), model=model)
    on_any = unpadded._longest_row(on_gpu, longest, planned, is_tuned=tuned)  # type: ignore[arg-type]
    assert on_any == max(longest, min(planned, 2**14))


@pytest.mark.parametrize("lengths", [(1, 7, 30), (1, 200, 7, 180, 30)], ids=str)
@pytest.mark.parametrize(("key_heads", "values", "scaling"), [(4, 16, None), (2, 16, None), (1, 8, 0.3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_attention_within_samples_is_that_of_each_sample(
    key_heads: int,
    values: int,
    scaling: float | None,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one group of short samples, or in one of long ones beside it."""
    monkeypatch.setattr(sample_groups, "_COST_OF_GROUP", 100.0)
    random, tokens = torch.Generator().manual_seed(1), sum(lengths)
    begins = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    states = [
        torch.randn(tokens, heads, width, generator=random).to(dtype).requires_grad_()
        for heads, width in ((4, 16), (key_heads, 16), (key_heads, values))
    ]
    outer = torch.randn(tokens, 4, values, generator=random).to(dtype)
    found = varlen_attention.within_samples(*states, begins, max(lengths), scaling)
    exact = [each.detach().double().requires_grad_() for each in states]
    query, key, value = exact
    shared = 4 // key_heads
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(shared, 1)) * (scaling or 0.25)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (sample[:, None] == sample[None]) & torch.ones(tokens, tokens).tril().bool()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    whole = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(shared, 1))
    ours = torch.autograd.grad(found, states, outer)
    theirs = torch.autograd.grad(whole, exact, outer.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip((found, *ours), (whole, *theirs), strict=True):
        assert float((one.double() - other).detach().norm() / other.detach().norm()) < tolerance


def test_too_little_memory_for_the_check_pads_samples_that_were_to_be_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packing_check, "_errors", failing)
    spec = make_spec(data=small_data(packing=True), max_steps=2)
    run = create_run(tmp_path / "run", spec, rule=TokenBudget(tokens=200))
    run_to_end(run)
    [event] = events_of_kind(run, "changed")
    assert event["message"].startswith("There is too little memory to check")
    assert any(line["padded_tokens"] > line["input_tokens"] for line in raw_log(run))
