"""Tries sizes of micro-batches while training: what `trial_policy.py` may choose, what it measures, and where
its decisions are recorded."""

from dataclasses import asdict

from app.contract.assignment import Assignment
from app.contract.plan import TokenBudget
from app.contract.reports import Tuning, TuningStep
from workers.run_directory import RunDirectory
from workers.training.accumulate import TrainedWindow
from workers.training.checkpoints.state import LearnedTuning, RunState
from workers.training.data.batch_loader import Indices
from workers.training.distributed.group import Group
from workers.training.micro_batches import fixed_cost
from workers.training.micro_batches.batches import tokens_of
from workers.training.micro_batches.budget import Budget
from workers.training.micro_batches.trial_policy import Bounds, Measured, Tuner
from workers.training.reporting import torch_profile
from workers.training.training_run import TrainingRun

_COMPARABLE_SHARE = 0.75
"""A window with fewer than this share of the effective batch's samples is not compared with others."""


def make_tuner(
    run: RunDirectory,
    assignment: Assignment,
    state: RunState,
    group: Group,
    until: int,
    planned_budget: Budget,
) -> Tuner:
    """What tries other sizes of micro-batch, on a single device whose plan leaves the size open.

    Args:
        until: the last step that an earlier attempt has reported.
        planned_budget: the plan's budget for how samples are laid out.
    """
    plan, learned = assignment.plan, state.tuning
    budget = state.budgets[0]  # a job that was tuned had one rank
    rule = plan.ranks[group.rank].micro_batch_rule
    tunes = assignment.spec.tune == "while_training" and group.size == 1
    planned = planned_budget.planned_tokens if tunes and isinstance(rule, TokenBudget) else None
    most = plan.most_tokens or planned or 0
    is_of_another_plan = learned.planned not in (None, planned)
    if is_of_another_plan or max(learned.tokens or 0, learned.trial or 0) > most:
        learned.use({})
        if budget.failed_tokens is None:
            budget.tokens = None
    budget.fixed = learned.fixed if planned is not None else None
    if planned is None:
        return Tuner(learned, adapts=False)
    learned.planned = planned
    if run.was_killed_on_trial:  # perhaps for lack of memory; whatever happens next, nothing is tried again
        known = [each.state for each in run.tuning() if each.step <= until]
        ended = LearnedTuning()
        ended.use(known[-1] if known else asdict(learned))
        ended.end()
        run.append_tuning(TuningStep(step=until, state=asdict(ended)))
        run.clear_trial()
        if state.step >= until:
            learned.end()
    recorded = {each.step: each.state for each in run.tuning()}
    return Tuner(
        learned,
        adapts=budget.failed_tokens is None and not state.fallbacks.checkpointing,
        recorded={step: own for step, own in recorded.items() if own.get("planned") == planned},
        until=until,
    )


def decide(training: TrainingRun, window: Indices, trained: TrainedWindow) -> None:
    """Lets the tuner decide the next window's token budget."""
    tuner, budget, loader, state = training.tuner, training.budget, training.loader, training.state
    spec, planned = training.assignment.spec, state.tuning.planned
    if planned is None:  # the job is not tuned
        return
    failed = budget.learned.failed_tokens
    if tuner.adapts and failed is not None:
        tuner.give_up()
        training.run.append_tuning(TuningStep(step=state.step, state=tuner.state()))
        current = tuner.next_tokens(planned)
        if current < failed:  # the size that failed was on trial, and the current one is known to fit
            budget.use_tuned(current)
    (work,) = trained.work
    lengths = loader.lengths(window)
    is_profiled = spec.profile and state.step == torch_profile.AT_STEP  # which takes time
    measured = Measured(
        samples=work.samples,
        tokens=work.tokens,
        micro_batches=work.micro_batches,
        largest_tokens=max(tokens_of(lengths[group], loader.layout.packed) for group in trained.groups),
        seconds=work.seconds,
        laps=() if is_profiled or budget.packed or not budget.by_length else trained.laps,
        fixed=budget.fixed_cost,
    )
    most = min(budget.most_worth_measuring, 2 * int(lengths.max()) * training.batch)
    bounds = Bounds(
        planned=planned,
        least=2 * int(lengths.mean()),
        most=most if spec.auto_adjust_batch_size else min(most, planned),
        windows_left=training.steps_total - state.step,
        is_comparable=len(window) >= _COMPARABLE_SHARE * training.batch
        and (trained.measurement is None or spec.noise_scale_every == 1),
    )
    is_first, before = tuner.learned.period == 0, tuner.learned.fixed
    decided = tuner.record_window(state.step, measured, bounds)
    budget.learned.fixed = tuner.learned.fixed
    if failed is None:
        budget.use_tuned(tuner.next_tokens(planned))
    if not decided:
        return
    training.run.append_tuning(TuningStep(step=state.step, state=tuner.state()))
    if tuner.learned.fixed not in (None, before):
        _report_fixed_cost(training, tuner.learned.fixed)
    found = tuner.result(planned)
    if found is not None and (is_first or found.token_budget != tuner.learned.before):
        _report(training, found, planned)


def _report_fixed_cost(training: TrainingRun, tokens: float) -> None:
    """Reports what a micro-batch was found to cost besides its tokens."""
    message = (
        f"Each micro-batch has a fixed cost equal to that of {tokens:,.0f} tokens: steps are divided so that "
        "they take the least time."
        if tokens < fixed_cost.MOST
        else "The fixed cost of a micro-batch is so large compared with that of its tokens that each step is "
        "divided into as few micro-batches as possible."
    )
    training.reporter.event(
        "fixed_cost",
        message,
        tokens=tokens,
    )


def _report(training: TrainingRun, found: Tuning, planned: int) -> None:
    """Reports what trying other sizes of micro-batch has found, as an event."""
    speeds = {each.token_budget: each.tokens_per_second for each in found.tried}
    chosen = found.token_budget
    details = []
    if chosen in speeds:
        details.append(f"{speeds[chosen]:,.0f} tokens/s")
    if chosen == planned:
        details.append("as planned")
    elif chosen in speeds and planned in speeds:
        details.append(f"{speeds[chosen] / speeds[planned]:.2f} times as fast as the planned {planned}")
    others = ", ".join(f"{size} ({speeds[size]:,.0f}/s)" for size in sorted(speeds) if size != chosen)
    training.reporter.event(
        "tuned",
        f"From now on, micro-batches have at most {chosen} tokens ({'; '.join(details)}). Also tried: "
        f"{others}.",
        **found.model_dump(mode="json"),
    )
