"""Compares Accrue with Hugging Face Trainer: for each guarantee, the error of both where Trainer can run.

The table is printed at the end of the test run. Only our side is asserted: theirs may be fixed at any time.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.contract.plan import FixedSize
from tests.harness.peers import Sample, Stream, run_trainer, sample_of
from tests.harness.runs import create_run, events_of, log_of, small_data, write_texts
from tests.harness.small_models import VOCABULARY, make_model
from tests.harness.specs import make_optimizer, make_schedule, make_spec
from tests.harness.table import compared
from tests.harness.training import interrupted_at, run_to_end, scale_losses
from workers.training.gradients.gradient_sums import SeparateAccumulator
from workers.training.losses.load_balancing_loss import load_balancing_loss_of
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout, MicroBatch, Row, collate
from workers.training.window import Clipping, LossScale, Window

K, ROWS = 4, 4


def make_rows(count: int, seed: int = 0, *, masked: tuple[int, ...] = ()) -> list[Row]:
    """Samples of unequal length whose first third is a prompt; the first token is the sample's number."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(random.integers(4, 40))
        tokens = random.integers(1, VOCABULARY, length).astype(np.int32)
        tokens[0] = number % VOCABULARY
        rows.append((tokens, (np.arange(length) >= length // 3) & (number not in masked)))
    return rows


def samples_of(rows: list[Row]) -> list[Sample]:
    return [sample_of(*row) for row in rows]


def targets_of(rows: list[Row]) -> int:
    return sum(int(counts[1:].sum()) for _, counts in rows)


def batch_of(rows: list[Row], **form: Any) -> MicroBatch:
    return collate(rows, BatchLayout(0, **form))


def vector(model: Any, gradients: dict[Tensor, Tensor]) -> Tensor:
    parts = [gradients.get(p, torch.zeros_like(p)).flatten().double() for p in model.parameters()]
    return torch.cat(parts)


def our_gradient(model: Any, rows: list[Row], size: int, **options: Any) -> Tensor:
    """The gradient of a window in micro-batches of `size` rows."""
    return window_of(model, rows, size, **options)[0]


def window_of(
    model: Any, rows: list[Row], size: int, *, smoothing: float = 0.0, held: bool = False
) -> tuple[Tensor, float, float]:
    """A window's gradient in micro-batches of `size` rows, and the loss and norm that are logged."""
    parameters = list(model.parameters())
    balance = load_balancing_loss_of(model, "window")
    loss = TokenLoss(model, smoothing=smoothing, routed=balance is not None)
    kept = SeparateAccumulator(parameters) if held else None
    window = Window(parameters, torch.optim.SGD(parameters, lr=0.0), gradients=kept)
    batches = [batch_of(rows[i : i + size], routed=balance is not None) for i in range(0, len(rows), size)]
    if balance is not None:
        balance.begin(len(rows))
        for batch in batches:
            balance.observe(loss.router_logits(batch), batch)
    window.open(targets_of(rows))
    for batch in batches:
        forward = loss(batch)
        window.add(forward.loss_sum, balance.share(forward.router_logits, batch) if balance else None)
    found = vector(model, window.gradient())
    closed = window.close()
    if kept is not None:
        kept.release()
    return found, closed.loss, closed.grad_norm


def true_gradient(
    model: Any, rows: list[Row], smoothing: float = 0.0, aux: float = 0.0
) -> tuple[Tensor, float]:
    """The whole batch's, written out by hand in fp64: attention mask, log-softmax, one mean."""
    batch = batch_of(rows)
    lengths = [len(tokens) for tokens, _ in rows]
    mask = torch.tensor([[int(i < n) for i in range(max(lengths))] for n in lengths])
    model.zero_grad(set_to_none=True)
    routed = {"output_router_logits": True} if aux else {}
    output = model(input_ids=batch.input_ids, attention_mask=mask, **routed)
    log_p = torch.log_softmax(output.logits.flatten(0, 1)[batch.target_positions], -1)
    picked = log_p.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    loss = -((1 - smoothing) * picked + smoothing * log_p.mean(-1)).sum() / len(batch.targets)
    whole = loss
    if aux:
        token_positions = mask.flatten().bool()
        probabilities = [logits.softmax(-1)[token_positions] for logits in output.router_logits]
        chosen = sum(
            torch.zeros_like(p).scatter_(1, p.topk(2, dim=-1).indices, 1.0).sum(0) for p in probabilities
        )
        count = token_positions.sum() * len(probabilities)
        mean_p = sum(p.sum(0) for p in probabilities) / count
        whole = loss + aux * len(mean_p) * ((chosen / count).detach() * mean_p).sum()
    whole.backward()
    found = vector(model, {p: p.grad for p in model.parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    return found, loss.item()


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


def both(family: str) -> tuple[Any, Any]:
    """The same weights in fp64, for ours and the truth, and in fp32, since Trainer's loss is fp32 anyway."""
    return make_model(family, torch.float64), make_model(family, torch.float32)


def test_gradient_loss_and_norm_of_a_window(tmp_path: Path) -> None:
    double, single = both("gpt2")
    rows = make_rows(K * ROWS)
    true, loss = true_gradient(double, rows)
    ours, our_loss, our_norm = window_of(double, rows, ROWS)
    record = run_trainer(single, samples_of(rows), tmp_path, rows=ROWS, accumulate=K, max_grad_norm=1e9)
    compared(
        "gradient of a window of 4 × 4 variable-length samples",
        error(ours, true),
        error(record.gradients[0], true),
    )
    compared("loss logged = loss trained", abs(our_loss - loss) / loss, abs(record.losses[0] - loss) / loss)
    norm = float(true.norm())
    compared(
        "gradient norm logged = true norm", abs(our_norm - norm) / norm, abs(record.norms[0] - norm) / norm
    )
    assert error(ours, true) <= 1e-12
    assert abs(our_loss - loss) <= 1e-12 * loss


def test_the_first_token_is_not_a_target(tmp_path: Path) -> None:
    """Data that labels every token, the first included, as most collators do."""
    double, single = both("gpt2")
    rows = [(tokens, np.ones(len(tokens), bool)) for tokens, _ in make_rows(K * ROWS)]
    true, _ = true_gradient(double, rows)
    ours = our_gradient(double, rows, ROWS)
    samples = [{"input_ids": t.tolist(), "labels": t.tolist()} for t, _ in rows]
    record = run_trainer(single, samples, tmp_path, rows=ROWS, accumulate=K)
    compared("label position 0 is not counted", error(ours, true), error(record.gradients[0], true))
    assert error(ours, true) <= 1e-12


def test_label_smoothing(tmp_path: Path) -> None:
    double, single = both("gpt2")
    rows = make_rows(K * ROWS)
    true, _ = true_gradient(double, rows, smoothing=0.1)
    ours = our_gradient(double, rows, ROWS, smoothing=0.1)
    record = run_trainer(
        single, samples_of(rows), tmp_path, rows=ROWS, accumulate=K, label_smoothing_factor=0.1
    )
    compared("label smoothing 0.1", error(ours, true), error(record.gradients[0], true))
    assert error(ours, true) <= 1e-12


def test_mixture_of_experts(tmp_path: Path) -> None:
    """Against an fp64 reference with eager experts; Trainer weighs the load-balancing loss wrongly."""
    double, single = both("mixtral")
    rows = make_rows(K * ROWS)
    true, _ = true_gradient(double, rows, aux=0.05)
    without, _ = true_gradient(double, rows)
    ours = our_gradient(double, rows, ROWS)
    single.config.output_router_logits = True
    record = run_trainer(single, samples_of(rows), tmp_path, rows=ROWS, accumulate=K)
    share = true - without
    strength = float((record.gradients[0] - without) @ share / (share @ share))
    compared(
        "mixture of experts: gradient with its load-balancing loss",
        error(ours, true),
        f"{error(record.gradients[0], true):.1e} (balance × {strength:.2f})",
    )
    assert error(ours, true) <= 1e-12


def test_a_sample_with_non_finite_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One NaN in one micro-batch of the second window: weights as before it, the sample named."""
    data = write_texts(tmp_path / "data.jsonl")
    lines = data.read_text().splitlines()
    lines[17] = json.dumps({"text": "Q is the marker"})
    data.write_text("\n".join(lines))
    scale_losses(monkeypatch, lambda batch: math.nan if bool((batch.input_ids == marker()).any()) else 1.0)
    spec = make_spec(data=small_data(), max_steps=None, epochs=1, optimizer=make_optimizer("sgd", 0.1))
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=4))
    run_to_end(run)
    skipped = [event for event in events_of(run) if event["type"] == "skipped"]
    assert [event["data"]["samples"] for event in skipped] == [[17]]
    assert [line["step"] for line in log_of(run)] == [1, 2]

    model = make_model("gpt2")
    honest = type(model).forward
    calls = 0

    @functools.wraps(honest)
    def poisoned(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        output = honest(self, *arguments, **named)
        if calls == K + 2:
            output.loss = output.loss * math.nan
        return output

    monkeypatch.setattr(type(model), "forward", poisoned)
    rows = make_rows(3 * K * ROWS, seed=1)
    record = run_trainer(model, samples_of(rows), tmp_path / "hf", rows=ROWS, accumulate=K, rate=0.1)
    weights = list(model.parameters())
    broken = sum(not bool(p.isfinite().all()) for p in weights)
    logged = [round(x, 2) for x in record.losses]
    theirs = f"{broken} of {len(weights)} weights NaN; losses logged: {logged}"
    compared("one NaN micro-batch", "weights bit-equal, sample 17 named, training goes on", theirs)


def marker() -> int:
    from workers.training.models.tiny_gpt2 import make_tokenizer

    return int(make_tokenizer()("Q").input_ids[0])


def test_a_fully_masked_window(tmp_path: Path) -> None:
    rows = make_rows(2 * K * ROWS, masked=tuple(range(K * ROWS)))
    double, single = both("gpt2")
    true, _ = true_gradient(double, rows[K * ROWS :])
    ours = our_gradient(double, rows[K * ROWS :], ROWS)
    with pytest.raises(ValueError, match="denominator must be above 0"):
        our_gradient(double, rows[: K * ROWS], ROWS)
    record = run_trainer(single, samples_of(rows), tmp_path, rows=ROWS, accumulate=K, rate=0.1)
    first = record.gradients[0]
    told = "a step of zeros" if bool((first == 0).all()) else f"{int(first.isnan().sum())} NaN in its step"
    compared("fully masked window", "no step, counted as skipped", told)
    assert error(ours, true) <= 1e-12


def test_a_last_window_of_one_sample(tmp_path: Path) -> None:
    """Seventeen samples in windows of sixteen: the last one is a step of its own."""
    double, single = both("gpt2")
    rows = make_rows(K * ROWS + 1)
    true, _ = true_gradient(double, rows[-1:])
    ours = our_gradient(double, rows[-1:], ROWS)
    record = run_trainer(single, samples_of(rows), tmp_path / "hf", rows=ROWS, accumulate=K)
    compared("tail of 1 sample (Trainer)", error(ours, true), error(record.gradients[-1], true))
    compared("tail of 1 sample (Accelerate)", error(ours, true), error(accelerates_tail(rows), true))
    assert error(ours, true) <= 1e-12


def accelerates_tail(rows: list[Row]) -> Tensor:
    """The last gradient of a loop written as Accelerate's guide has it."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from tests.harness.peers import padded

    model = make_model("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append(vector(model, {p: p.grad.clone() for p in model.parameters()}))
    )
    accelerator = Accelerator(gradient_accumulation_steps=K, cpu=True)
    loader = DataLoader(samples_of(rows), batch_size=ROWS, collate_fn=padded)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return found[-1]


def test_a_stream_of_unknown_length(tmp_path: Path) -> None:
    """Ten samples, windows of eight, two epochs: which samples make each step?"""
    rows = make_rows(10)
    record = run_trainer(
        make_model("gpt2"), Stream(samples_of(rows)), tmp_path / "hf", rows=2, accumulate=4, max_steps=4
    )
    write_texts(tmp_path / "data.jsonl", 10)
    spec = make_spec(data=small_data(examples=10), max_steps=None, epochs=2, effective_batch_size=8)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=2))
    run_to_end(run)
    ours = [line["samples"] for line in log_of(run)]
    compared(
        "stream's tail: samples of each step, 10 by 8, 2 epochs",
        str(ours),
        str([len(s) for s in record.samples]),
    )
    assert ours == [8, 2, 8, 2]


def resumed(folder: Path, rows: int) -> str:
    """Trainer interrupted after two steps of 2 × 4 samples, and resumed with accumulation 4."""
    data, checkpoint = samples_of(make_rows(48)), str(folder / "checkpoint-2")
    kept = {"save_strategy": "steps", "save_steps": 2}
    first = run_trainer(make_model("gpt2"), data, folder, rows=4, accumulate=2, max_steps=2, **kept)
    second = run_trainer(
        make_model("gpt2"), data, folder, rows=rows, accumulate=4, max_steps=3, resume=checkpoint
    )
    seen = [sample for step in first.samples + second.samples for sample in step]
    return f"{len(set(range(max(seen))) - set(seen))} skipped, {len(seen) - len(set(seen))} repeated"


@pytest.mark.thorough
def test_resume_with_accumulation_2_then_4(tmp_path: Path) -> None:
    """The micro-batch halved or as it was: no sample is skipped, none comes twice, and the losses agree."""
    theirs = f"micro-batch halved: {resumed(tmp_path / 'a', 2)}; kept: {resumed(tmp_path / 'b', 4)}"
    spec = make_spec(data=small_data(), max_steps=None, epochs=1, effective_batch_size=8)
    plain = create_run(tmp_path / "plain", spec, rule=FixedSize(samples=4))
    run_to_end(plain)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=4))
    interrupted_at(run, 2 * (1 + 2))
    create_run(tmp_path / "run", spec, attempt=2, rule=FixedSize(samples=2))
    run_to_end(run)
    a, b = log_of(plain), log_of(run)
    assert [(x["samples"], x["tokens"]) for x in a] == [(x["samples"], x["tokens"]) for x in b]
    losses = max(abs(x["loss"] - y["loss"]) / x["loss"] for x, y in zip(a, b, strict=True))
    ours = f"0 skipped, 0 repeated; losses differ by {losses:.0e}"
    compared("resume with accumulation 2 → 4", ours, theirs)
    assert losses <= 1e-5


def test_the_rate_steps_once_per_update(tmp_path: Path) -> None:
    schedule = make_schedule("linear", warmup_steps=2)
    spec = make_spec(data=small_data(), max_steps=4, effective_batch_size=8, schedule=schedule)
    run = create_run(tmp_path / "run", spec, rule=FixedSize(samples=2))
    run_to_end(run)
    expected = [0.0, 0.5e-3, 1e-3, 0.5e-3]
    rates = [line["learning_rate"] for line in log_of(run)]
    record = run_trainer(
        make_model("gpt2"), samples_of(make_rows(32)), tmp_path / "hf", rows=2, accumulate=4, rate=1e-3,
        factor=lambda step: [0.0, 0.5, 1.0, 0.5, 0.0][step],
    )  # fmt: skip
    ours = max(abs(a - b) for a, b in zip(rates, expected, strict=True))
    theirs = max(abs(a - b) for a, b in zip(record.rates, expected, strict=True))
    compared("learning rate stepped per update", ours, theirs)
    assert ours == 0.0


def test_the_whole_gradient_is_clipped_once(tmp_path: Path) -> None:
    """The clipped gradient is the true one at the limit's length, not the sum of clipped parts."""
    double, single = both("gpt2")
    rows = make_rows(K * ROWS)
    true, _ = true_gradient(double, rows)
    limit = 0.25 * float(true.norm())
    before = torch.cat([p.detach().flatten().clone() for p in double.parameters()])
    optimizer = torch.optim.SGD(double.parameters(), lr=1.0)
    window = Window(double.parameters(), optimizer, Clipping(limit))
    loss = TokenLoss(double)
    window.open(targets_of(rows))
    for i in range(0, len(rows), ROWS):
        window.add(loss(batch_of(rows[i : i + ROWS])).loss_sum)
    closed = window.close()
    moved = before - torch.cat([p.detach().flatten() for p in double.parameters()])
    wanted = true * (limit / (true.norm() + 1e-6))
    record = run_trainer(single, samples_of(rows), tmp_path, rows=ROWS, accumulate=K, max_grad_norm=limit)
    compared("clipping after accumulation", error(moved, wanted), error(record.gradients[0], wanted))
    assert error(moved, wanted) <= 1e-12
    assert closed.grad_norm == pytest.approx(float(true.norm()), rel=1e-12)


def test_fp16_gradients_are_unscaled_once() -> None:
    """Under a loss scale of 2**10 the logged norm and the step are those without it."""
    model = make_model("gpt2", torch.float64)
    rows = make_rows(K * ROWS)
    true, _ = true_gradient(model, rows)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    window = Window(model.parameters(), optimizer, Clipping(None), LossScale(1024.0))
    loss = TokenLoss(model)
    window.open(targets_of(rows))
    for i in range(0, len(rows), ROWS):
        window.add(loss(batch_of(rows[i : i + ROWS])).loss_sum)
    closed = window.close()
    moved = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    compared("fp16: unscaled once (scale 1024)", error(moved, true), "needs CUDA")
    assert error(moved, true) <= 1e-12
    assert closed.grad_norm == pytest.approx(float(true.norm()), rel=1e-12)


def test_accumulation_under_bf16_weights(tmp_path: Path) -> None:
    """Sixty-four micro-batches of one sample: summed in fp32, in bf16, and by Trainer."""
    rows = make_rows(64, seed=3)
    model = make_model("gpt2").to(torch.bfloat16)
    true, _ = true_gradient(make_model("gpt2").to(torch.bfloat16).double(), rows)
    whole = our_gradient(model, rows, 64)
    held = our_gradient(model, rows, 1, held=True)
    in_place = our_gradient(model, rows, 1)
    record = run_trainer(model, samples_of(rows), tmp_path, rows=1, accumulate=64)
    compared(
        "64 micro-batches under bf16 weights, against fp64",
        f"{error(held, true):.1e} in fp32, {error(in_place, true):.1e} in bf16, "
        f"{error(whole, true):.1e} in one piece",
        error(record.gradients[0], true),
    )
    assert error(held, true) <= 1.05 * error(whole, true)
    assert error(held, true) < error(in_place, true)
