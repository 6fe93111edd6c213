"""Reports a run: a banner at its start, and a log line for every step."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from math import ceil

import torch

from app.contract.plan import TokenBudget
from app.contract.reports import MOST_MICRO_LOSSES, MOST_NORMS, LogLine, NoiseScale, RankLine, Rewards
from workers.training.accumulate import TrainedWindow, divide
from workers.training.data.batch_loader import Indices
from workers.training.data.preparation import PreparationStatistics
from workers.training.devices import memory
from workers.training.micro_batches.batches import Cursor, tokens_of
from workers.training.training_run import TrainingRun

log = logging.getLogger("accrue.trainer")


def report_start(training: TrainingRun, prepared: PreparationStatistics) -> None:
    """Reports the data and the banner: what will be trained, on what, and how."""
    spec, plan = training.assignment.spec, training.assignment.plan
    notes = prepared.notes(spec.data.max_length)
    training.reporter.event(
        "data",
        f"{prepared.samples} samples, {prepared.tokens} tokens, the longest {prepared.longest}"
        + (f"; {', '.join(notes)}." if notes else "."),
        "warning" if notes else "info",
        **asdict(prepared),
    )
    banner = _banner(training)
    for name, value in banner.items() if training.group.leads else ():
        log.info("%-18s %s", name, value)
    training.reporter.event(
        "training",
        "; ".join(f"{name} {value}" for name, value in banner.items()) + ".",
        steps_total=training.steps_total,
        cut=training.rule.model_dump(),
        parameters=sum(p.numel() for p in training.replica.model.parameters()),
        trainable_parameters=sum(p.numel() for p in training.replica.model.parameters() if p.requires_grad),
        threads=plan.threads,
        banner=banner,
    )


def _banner(training: TrainingRun) -> dict[str, str]:
    spec, plan, steps = training.assignment.spec, training.assignment.plan, training.steps_total
    device = training.assignment.plan.ranks[training.group.rank]
    on = training.replica.device
    name = torch.cuda.get_device_name(on) if on.type == "cuda" else "cpu"
    by = training.rule
    windows_in_epoch = ceil(len(training.loader.samples) / spec.effective_batch_size)
    epochs = spec.epochs or round(steps / windows_in_epoch, 2)
    steps_each = _micro_batches(training)
    devices = len(plan.ranks)
    samples_each = -(-spec.effective_batch_size // (steps_each * devices))
    times = f"about {steps_each} × {samples_each}" + (f" × {devices} devices" if devices > 1 else "")
    used = ", ".join(each.name for each in training.replica.kernels)
    size = f"{by.tokens} tokens" if isinstance(by, TokenBudget) else f"{device.micro_batch_size} samples"
    return {
        "epochs": f"{epochs:g}",
        "steps": str(steps),
        "optimizer": spec.optimizer.name,
        "learning rate": f"{spec.optimizer.learning_rate:g}, {spec.schedule.name}",
        "weight decay": f"{spec.optimizer.weight_decay:g}",
        "device": f"{devices} × {name}" if devices > 1 else name,
        "micro-batch": f"at most {size}",
        "accumulation steps": f"about {steps_each}",
        "effective batch": f"{spec.effective_batch_size}, {times}",
        "precision": plan.precision,
        **({"kernels": used} if used else {}),
        "predicted memory": f"{device.predicted_peak_bytes / 2**30:.2f} GiB",
    }


def _micro_batches(training: TrainingRun) -> int:
    """The number of micro-batches in the next window; the plan assumes samples of full length."""
    if training.finished:
        return training.assignment.plan.accumulation_steps
    return max(map(len, divide(training, training.next_window())))


def log_line(
    training: TrainingRun,
    at: Cursor,
    index: int,
    window: Indices,
    trained: TrainedWindow,
    batch: int,
    rate: float,
    noise: NoiseScale | None,
) -> LogLine:
    """The log line of the step that was just applied."""
    spec, state, loader, result = training.assignment.spec, training.state, training.loader, trained.result
    tokens, lengths = int(loader.samples.tokens[window].sum()), loader.lengths(window)
    device = training.replica.device
    peak, reserved = memory.peak(device), memory.peak_reserved(device)
    remembers = spec.log_memory_usage
    rest = max(0.0, trained.seconds - trained.data_seconds - result.synchronise_seconds)
    optimizer_seconds = min(result.optimizer_seconds, rest)  # on a GPU, a part may lie before this window
    return LogLine(
        attempt=training.assignment.attempt,
        step=state.step,
        micro_step=state.progress.micro_step,
        batch_idx=index,
        epoch=at.epoch,
        samples=len(window),
        loss=result.loss,
        loss_ema=state.losses.average or 0.0,
        gradient_accumulation_steps=max(map(len, trained.groups_by_rank)),
        effective_batch_size=min(batch, len(window)),  # at an epoch's end there may be fewer samples left
        physical_batch_size=max(map(len, trained.groups)),
        learning_rate=rate,
        grad_norm=result.grad_norm,
        tokens=int(training.loader.samples.targets[window].sum()),
        input_tokens=tokens,
        padded_tokens=trained.padded_tokens,
        tokens_per_second=tokens / trained.seconds,
        memory_gb=memory.gib(result.memory_bytes) if remembers else None,
        peak_gb=memory.gib(max(result.memory_bytes, peak)) if remembers else None,
        largest_tokens=max(tokens_of(lengths[group], loader.layout.packed) for group in trained.groups),
        noise_scale=noise.value if noise else None,
        skipped=state.progress.skipped,
        time=time.time(),
        data_seconds=trained.data_seconds,
        forward_backward_seconds=rest - optimizer_seconds,
        optimizer_seconds=optimizer_seconds,
        synchronise_seconds=result.synchronise_seconds,
        aux_loss=result.extra_loss if training.replica.balance else None,
        micro_losses=_micro_means(training, window, trained)
        if spec.log_micro_losses and len(trained.groups) <= MOST_MICRO_LOSSES
        else None,
        gradient_norms=dict(islice(result.layer_norms.items(), MOST_NORMS)) if spec.log_gradients else None,
        ranks=_ranks(training, trained) if training.group.size > 1 else None,
        reserved_gb=memory.gib(reserved) if remembers and reserved is not None else None,
        rewards=rewards_of(training, result.measured),
    )


def rewards_of(training: TrainingRun, measured: Sequence[float]) -> Rewards | None:
    """What a preference objective has measured of samples (`Objective.measured`); None without one."""
    objective = training.replica.token_loss.objective
    if objective is None:
        return None
    chosen, rejected, chosen_log_prob, rejected_log_prob, correct, of_chosen, of_rejected = measured
    divergence, predicts_tokens = objective.divergence, not objective.spec.scores_sequences
    return Rewards(
        chosen=chosen / of_chosen if of_chosen else None,
        rejected=rejected / of_rejected if of_rejected else None,
        margin=chosen / of_chosen - rejected / of_rejected if of_chosen and of_rejected else None,
        accuracy=correct / of_chosen if of_chosen and objective.spec.is_of_pairs else None,
        chosen_log_prob=chosen_log_prob / of_chosen if of_chosen and predicts_tokens else None,
        rejected_log_prob=rejected_log_prob / of_rejected if of_rejected and predicts_tokens else None,
        divergence=None if divergence is None else float(divergence),
    )


def _ranks(training: TrainingRun, trained: TrainedWindow) -> tuple[RankLine, ...]:
    """What each rank did in a window, and since the start of the job."""
    slowest = max(each.seconds for each in trained.work)
    return tuple(
        RankLine(
            rank=rank,
            micro_batches=work.micro_batches,
            samples=work.samples,
            tokens=work.tokens,
            seconds=work.seconds,
            idle_seconds=slowest - work.seconds,
            peak_gb=memory.gib(work.peak_bytes) if training.assignment.spec.log_memory_usage else None,
            total_micro_batches=totals.micro_batches,
            total_tokens=totals.tokens,
            total_seconds=totals.seconds,
            total_idle_seconds=totals.idle_seconds,
        )
        for rank, (work, totals) in enumerate(zip(trained.work, training.state.ranks, strict=False))
    )


def _micro_means(training: TrainingRun, window: Indices, trained: TrainedWindow) -> tuple[float, ...]:
    """Each micro-batch's own mean loss, from its part of the window's."""
    whole = training.loader.samples.denominator(window)
    own = [training.loader.samples.denominator(window[group]) for group in trained.groups]
    return tuple(
        part * whole / share if share else 0.0
        for part, share in zip(trained.result.micro_losses, own, strict=True)
    )
