"""Builds everything that a run needs: model, data, optimizer, window, and the position to resume from."""

import contextlib
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.contract.assignment import Assignment
from app.contract.plan import FixedCount, Plan, RankPlan, TokenBudget
from app.contract.reports import LearnedLimits
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training.checkpoints import checkpoint
from workers.training.checkpoints.checkpoint_writer import CheckpointWriter
from workers.training.checkpoints.state import Fallbacks, LearnedBudget, RunState
from workers.training.checks.head_check import check_head, check_scores
from workers.training.checks.loss_checks import (
    check_causality,
    check_routing,
    check_that_it_runs,
    final_failures,
)
from workers.training.checks.packing_check import check_packing, most_samples
from workers.training.data.batch_loader import Loader
from workers.training.data.preparation import PreparationStatistics, Samples, held_out, of_shard, prepare
from workers.training.devices.device import device_of
from workers.training.distributed.group import ALONE, Group
from workers.training.distributed.shares import Shares
from workers.training.exceptions import CannotTrain, Interrupted
from workers.training.kernels.cpu_products import choose_products
from workers.training.kernels.lean_layers import choose_lean_layers
from workers.training.kernels.selection import choose_kernels
from workers.training.kernels.unpadded import choose_layout
from workers.training.losses.load_balancing_loss import LoadBalancingLoss, load_balancing_loss_of
from workers.training.losses.loss import TokenLoss
from workers.training.losses.reference import key_of, reference_log_probabilities
from workers.training.make_replica import make_replica, place_parameters
from workers.training.micro_batches import first_steps_tuning
from workers.training.micro_batches.batches import BatchLayout, Buckets
from workers.training.micro_batches.budget import Budget
from workers.training.micro_batches.trials import make_tuner
from workers.training.models import base_model
from workers.training.models.dropout import turn_dropout_off
from workers.training.models.model_parts import embeddings_of, longrope_short_length, padding_token
from workers.training.models.parameters import Parameters
from workers.training.models.trainable import recompute_activations
from workers.training.optimizer import biases_and_gains, make_optimizer
from workers.training.recovery import guards
from workers.training.replica import Replica
from workers.training.reporting.trackers import Trackers
from workers.training.training_run import Interruption, TrainingRun


def start(
    run: RunDirectory,
    assignment: Assignment,
    reporter: Reporter,
    trackers: Trackers,
    interrupted: Interruption,
    group: Group = ALONE,
) -> tuple[TrainingRun, PreparationStatistics]:
    """Loads model and data, and resumes from the newest undamaged checkpoint.

    Rank 0 prepares the files first; the others then find them ready.

    Raises:
        CannotTrain: the job cannot be trained as it stands.
        Interrupted: an interruption was requested while data were prepared.
    """
    spec, plan = assignment.spec, assignment.plan
    base, model, tokenizer = _load(run, assignment, reporter, group)
    prepared, samples, validation = _tokenised(run, assignment, tokenizer, interrupted, reporter, group)
    if group.leads and run.digest_of_base() is None:
        run.write_digest_of_base(guards.digest_of_weights(model))
    for each in (samples, validation):
        if each is not None:
            _check_token_ids(each, model, spec.model.name)
    replica, state = _replica(run, assignment, model, reporter, group)
    layout = _layout(assignment, plan.ranks[group.rank], tokenizer, model, replica.balance)
    loader = Loader(samples, validation, layout, replica.device, spec.seed)
    loader.limit_buckets(state.budgets[group.rank].tokens)
    _check_exactness(replica, loader, assignment, state.fallbacks, reporter, group)
    choose_kernels(run, replica, loader, spec, reporter, group.rank)
    at_start = state.step == 0 and state.progress.micro_step == 0
    choose_lean_layers(replica, loader, spec, state.fallbacks, reporter, group, at_start=at_start)
    rows = _usual_tokens(plan.ranks[group.rank], spec.effective_batch_size, loader)
    choose_products(replica, loader, spec, state.fallbacks, reporter, rows, at_start=at_start)
    longest_row = choose_layout(
        run, replica, loader, assignment, state.fallbacks, reporter, group, _most_tokens(assignment)
    )
    until, recorded = _earlier_steps(run, assignment, group)
    budgets = [
        Budget(
            each,
            learned,
            spec.effective_batch_size,
            most_tokens=plan.most_tokens,
            by_length=spec.clip_mode != "each_micro_batch",
            packed=loader.layout.packed,
            separate_above=loader.layout.separate_above,
            longest_row=longest_row,
        )
        for each, learned in zip(plan.ranks, state.budgets, strict=False)
    ]
    most_tokens = min(each.tokens(loader.longest) for each in budgets)
    _begin_objective(
        run, assignment, replica, loader, most_tokens, interrupted, reporter, group, at_start=at_start
    )
    training = TrainingRun(
        assignment=assignment,
        run=run,
        reporter=reporter,
        trackers=trackers,
        interrupted=interrupted,
        base=base,
        tokenizer=tokenizer,
        replica=replica,
        loader=loader,
        state=state,
        budgets=budgets,
        shares=_shares(assignment, state, budgets, recorded, until),
        tuner=make_tuner(run, assignment, state, group, until, budgets[group.rank]),
        group=group,
        checkpoints=CheckpointWriter(
            run.checkpoints, in_background=replica.device.type == "cuda" and not replica.is_sharded
        ),
    )
    return training, prepared


def _load(
    run: RunDirectory, assignment: Assignment, reporter: Reporter, group: Group
) -> tuple[Path, Any, Any]:
    """The base model's folder, the model and its tokenizer. Rank 0 makes the folder."""
    base = run.base
    with leader_first(group):
        if group.leads:
            base = base_model.stage_base_model(assignment, run)
    model, tokenizer, notes = base_model.load(assignment, base)
    objective = assignment.spec.objective
    if objective is not None and objective.name != "classification" and turn_dropout_off(model):
        notes = [
            *notes,
            "dropout and jitter are turned off: they would change the comparison of sequences in "
            f"{objective.name}",
        ]
    for note in notes:
        reporter.event("changed", f"{note[0].upper()}{note[1:]}.", "warning")
    return base, model, tokenizer


def _tokenised(
    run: RunDirectory,
    assignment: Assignment,
    tokenizer: Any,
    interrupted: Interruption,
    reporter: Reporter,
    group: Group,
) -> tuple[PreparationStatistics, Samples, Samples | None]:
    """The samples to train on and to evaluate on. Rank 0 writes them; the others then find them ready.

    Raises:
        CannotTrain: the tokenizer fails; the reason does not quote its message, which may be training text.
    """
    try:
        with leader_first(group):
            return _data(run, assignment, tokenizer, interrupted, reporter)
    except (CannotTrain, Interrupted, OSError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers' panics are BaseExceptions
        raise CannotTrain(
            "data_not_tokenised",
            f"the model's tokenizer could not read the data ({type(error).__name__}): accrue preview shows "
            "how samples are tokenised",
        ) from None


def _replica(
    run: RunDirectory, assignment: Assignment, model: Any, reporter: Reporter, group: Group
) -> tuple[Replica, RunState]:
    """This rank's model and optimizer, with the weights and the state of the newest checkpoint."""
    spec, plan = assignment.spec, assignment.plan
    device = device_of(plan, plan.ranks[group.rank], deterministic=spec.deterministic)
    balance = load_balancing_loss_of(model, spec.aux_scope)
    token_loss = TokenLoss(model, smoothing=spec.label_smoothing, routed=balance is not None)
    token_loss.passes_boundaries = spec.attention == "flash_attention_2" and not spec.compile
    without_decay = set() if spec.optimizer.decays_biases else biases_and_gains(token_loss.model)
    parameters = place_parameters(assignment, token_loss, device, group)
    host = torch.device("cpu") if spec.use_cpu_offload and device.type == "cuda" else None
    undecayed = {own for name, own in parameters.trained.items() if name in without_decay}
    optimizer = make_optimizer(spec.optimizer, parameters.trained.values(), host, undecayed)
    state = _resume(run, parameters, optimizer, reporter, group)
    state.budgets += [LearnedBudget() for _ in plan.ranks[len(state.budgets) :]]
    apply_learned(run, plan, state, reporter, group)
    if state.fallbacks.checkpointing:
        recompute_activations(model)
    return make_replica(assignment, device, token_loss, parameters, optimizer, balance, state, group), state


def _check_exactness(
    replica: Replica,
    loader: Loader,
    assignment: Assignment,
    fallbacks: Fallbacks,
    reporter: Reporter,
    group: Group,
) -> None:
    """Checks what exact accumulation needs of this model, and falls back where there is another way.

    Raises:
        CannotTrain: the model cannot be trained exactly in micro-batches.
    """
    spec = assignment.spec
    before = guards.digest_of_weights(replica.model) if group.leads and not replica.is_sharded else None
    with final_failures(group):
        check_routing(replica, loader, reporter, spec.aux_scope)
        check_head(replica, loader, fallbacks, reporter, group)
        if not replica.is_sharded and not spec.compile:  # where it would cost an exchange, or a compilation
            check_that_it_runs(replica, loader)
        check_causality(replica, loader, group)
        check_packing(
            replica, loader, _most_tokens(assignment), most_samples(spec), fallbacks, reporter, group
        )
    changed = before is not None and guards.digest_of_weights(replica.model) != before
    if group.broadcast(changed):
        raise CannotTrain(
            "model_fails",
            "the model changes its own weights when it is evaluated, so that an evaluation or a checkpoint "
            "would change what it learns: it cannot be trained",
        )


def _check_any_pair_differs(samples: Samples, max_length: int) -> None:
    if all(samples.has_equal_answers(each) for each in np.flatnonzero(samples.targets).tolist()):
        raise CannotTrain(
            "nothing_to_learn",
            "the chosen and the rejected answer are the same in every pair, within max_length "
            f"{max_length}: raise max_length, or check the data",
        )


def _begin_objective(
    run: RunDirectory,
    assignment: Assignment,
    replica: Replica,
    loader: Loader,
    tokens: int,
    interrupted: Interruption,
    reporter: Reporter,
    group: Group,
    *,
    at_start: bool,
) -> None:
    """From here on, the loss is the objective's. The earlier checks compare token losses, from which every
    objective of a language model is computed; for models that score sequences, see `probe_layer`.

    Args:
        tokens: the maximum number of tokens of a micro-batch.
        at_start: whether the replica has the weights that the job starts from.

    Raises:
        CannotTrain: no pair has two different answers; or see `reference_log_probabilities`.
        Interrupted: see there.
    """
    spec = assignment.spec
    if spec.objective is None:
        return
    replica.token_loss.begin_objective(spec.objective)
    base = run.digest_of_base() or ""
    folders = ((loader.samples, run.data), (loader.validation, run.data / "validation"))
    for samples, folder in folders:
        if samples is None:
            continue
        samples.begin_objective(spec.objective)
        whole = samples is loader.samples and spec.shard is None
        if whole and spec.objective.compares_answers_only:
            _check_any_pair_differs(samples, spec.data.max_length)
        if not spec.objective.has_reference:
            continue
        samples.reference = reference_log_probabilities(
            folder,
            key_of((folder / "prepared.json").read_text(), base),
            samples,
            replica,
            loader.layout,
            tokens,
            group,
            may_compute=at_start,
            interrupted=interrupted,
            report=reporter.preparing,
        )
    if spec.objective.scores_sequences:
        check_scores(replica, loader)


def _usual_tokens(rank: RankPlan, effective_batch: int, loader: Loader) -> int:
    """Tokens of a micro-batch as planned; the whole batch's, if these are fewer."""
    rule = rank.micro_batch_rule
    planned = rank.micro_batch_size * loader.longest
    if isinstance(rule, TokenBudget):
        planned = rule.unpadded_tokens or rule.tokens
    return max(1, min(planned, round(effective_batch * float(loader.samples.lengths.mean()))))


def _most_tokens(assignment: Assignment) -> int:
    """Tokens of the largest micro-batch that is planned for any rank. If the effective batch grows, a fixed
    number of micro-batches grows in proportion, but is rounded."""
    plan, most = assignment.plan, 0
    for rank in plan.ranks:
        rule = rank.micro_batch_rule
        samples = rank.micro_batch_size
        if isinstance(rule, FixedCount):
            together = rule.micro_batches * len(plan.ranks)
            samples = max(samples, ceil(assignment.spec.effective_batch_size / together))
        full = samples * assignment.spec.data.tokens_per_sample
        if assignment.spec.ramp.name != "constant":
            full += full // 2
        tokens = max(rule.tokens, rule.unpadded_tokens or 0) if isinstance(rule, TokenBudget) else full
        if assignment.spec.tune is not None:  # sizes up to four times the planned one are tried
            tokens = max(tokens, min(plan.most_tokens or 0, round(tokens * first_steps_tuning.LADDER[0])))
        most = max(most, tokens)
    return most


def whole_model(training: TrainingRun) -> Any:
    """Returns the model with all of its weights. If the ranks hold only parts, only rank 0 gets the whole
    model, and each other rank gets its own part. Every rank calls it."""
    replica = training.replica
    if not replica.is_sharded:
        return replica.model
    weights = {name: replica.parameters.whole(name, own) for name, own in replica.parameters.trained.items()}
    if not training.group.leads:
        return replica.model
    model, _, _ = base_model.load(training.assignment, training.base)
    with torch.no_grad():
        for name, parameter in Parameters(model).trained.items():
            parameter.copy_(weights[name])
    return model


def _earlier_steps(run: RunDirectory, assignment: Assignment, group: Group) -> tuple[int, list[Any]]:
    """The last step that an earlier attempt has reported, and the changes of the ranks' shares up to it, as
    pairs of step and shares."""
    decides = group.size > 1 or assignment.spec.tune == "while_training"
    until: int = group.broadcast(run.last_step() if decides and group.leads else 0)
    if group.leads:
        run.forget_decisions(after=until)
    recorded: list[Any] = group.broadcast(
        [[each.step, each.shares] for each in run.shares()] if group.size > 1 and group.leads else []
    )
    return until, recorded


def _shares(
    assignment: Assignment, state: RunState, budgets: Sequence[Budget], recorded: list[Any], until: int
) -> Shares:
    """Each rank's share of the work. Changes that earlier attempts recorded are applied again after the same
    steps."""
    return Shares(
        [rank.share_of_tokens for rank in assignment.plan.ranks],
        state.shares,
        adapts=assignment.plan.strategy == "ddp" and not any(budget.fixes_count for budget in budgets),
        recorded={step: shares for step, shares in recorded if step > state.step},
        until=until,
    )


def _data(
    run: RunDirectory, assignment: Assignment, tokenizer: Any, interrupted: Interruption, reporter: Reporter
) -> tuple[PreparationStatistics, Samples, Samples | None]:
    """The tokenised samples to train on, and those to evaluate on."""
    spec = assignment.spec.data
    taken = held_out(spec, assignment.spec.seed) if spec.held_out() else None
    source = Path(assignment.data_file)
    trained = None if taken is None else ~taken
    if assignment.spec.shard is not None:
        trained = of_shard(
            assignment.spec.shard, np.ones(spec.examples, np.bool_) if trained is None else trained
        )
    prepared = prepare(spec, source, tokenizer, run.data, trained, interrupted, reporter.preparing)
    samples = Samples(run.data)
    if spec.validation is None:
        return prepared, samples, None
    folder = run.data / "validation"
    try:
        if assignment.validation_file is None:
            prepare(spec, source, tokenizer, folder, taken, interrupted)
        else:
            own = spec.validation.model_dump(exclude={"share"}) | {"validation": None}
            file = Path(assignment.validation_file)
            prepare(spec.model_copy(update=own), file, tokenizer, folder, interrupted=interrupted)
    except CannotTrain as error:
        raise CannotTrain(error.code, f"validation data: {error}") from None
    return prepared, samples, Samples(folder)


def apply_learned(run: RunDirectory, plan: Plan, state: RunState, reporter: Reporter, group: Group) -> None:
    """Uses what ranks have learned by running out of memory since the last checkpoint."""
    learned: list[Any] = group.broadcast(
        [[rank, own.model_dump()] for rank, own in run.learned(len(plan.ranks)).items()]
        if group.leads
        else []
    )
    for rank, found in learned:
        own, budget = LearnedLimits.model_validate(found), state.budgets[rank]
        before = (budget.tokens, budget.failed_tokens, state.fallbacks.checkpointing)
        if own.tokens is not None and own.failed_tokens is not None:
            budget.tokens = min(own.tokens, budget.tokens or own.tokens)
            budget.failed_tokens = min(own.failed_tokens, budget.failed_tokens or own.failed_tokens)
        state.fallbacks.checkpointing |= own.checkpointing
        if before == (budget.tokens, budget.failed_tokens, state.fallbacks.checkpointing):
            continue  # another rank has learned more since
        reporter.event(
            "out_of_memory",
            f"Out of memory on rank {rank}: all ranks started again from the last checkpoint. "
            + (
                "All of them now use gradient checkpointing."
                if own.checkpointing
                else f"Rank {rank} now uses micro-batches of at most {own.tokens} tokens."
            ),
            "warning",
            token_budget=own.tokens,
            failed_tokens=own.failed_tokens,
            rank=rank,
        )


def _check_token_ids(samples: Samples, model: Any, name: str) -> None:
    """Checks that the model has an embedding for each token of the data.

    Raises:
        CannotTrain: it has not.
    """
    embeddings, largest = embeddings_of(model), samples.largest_token()
    if embeddings is not None and largest >= embeddings:
        raise CannotTrain(
            "tokenizer_too_large",
            f"the tokenizer of {name} produces the token {largest}, but the model has only {embeddings} "
            "embeddings: provide files that belong together, or enlarge the embeddings",
        )


def _layout(
    assignment: Assignment, rank: RankPlan, tokenizer: Any, model: Any, balance: LoadBalancingLoss | None
) -> BatchLayout:
    data, short = assignment.spec.data, longrope_short_length(model)
    budget = rank.micro_batch_size * data.tokens_per_sample
    separate_above = None if short is None else short * data.sequences_per_sample
    return BatchLayout(
        pad_id=padding_token(tokenizer, model),
        packed=data.packing,
        routed=balance is not None,
        buckets=Buckets(budget, data.max_length, short) if assignment.spec.compile else None,
        separate_above=separate_above,
    )


@contextlib.contextmanager
def leader_first(group: Group) -> Iterator[None]:
    """Lets rank 0 run the block first, and the other ranks after it."""
    if not group.leads:
        group.wait()
    yield
    if group.leads:
        group.wait()


def _complete_report(run: RunDirectory, state: RunState, reporter: Reporter) -> None:
    """Marks and reports the checkpoint that a run resumes from, if an attempt was killed between writing
    and reporting it."""
    checkpoint.mark_if_best(run.checkpoints, state)
    newest = checkpoint.newest_first(run.checkpoints)[0]
    if not run.has_reported(newest.name):
        reporter.event("checkpoint", f"Checkpoint at step {state.step}.", step=state.step, name=newest.name)


def _resume(
    run: RunDirectory,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    reporter: Reporter,
    group: Group,
) -> RunState:
    try:
        with leader_first(group):  # which moves damaged checkpoints out of the way
            state, damaged = checkpoint.restore(run.checkpoints, parameters, optimizer)
            if state is not None and group.leads:
                _complete_report(run, state, reporter)
    except checkpoint.AllDamaged as error:
        message = f"every checkpoint is damaged ({error}): check the disk, and submit the job again"
        raise CannotTrain("checkpoints_damaged", message) from None
    for name in damaged:
        message = f"Checkpoint {name} is damaged and was skipped."
        reporter.event("checkpoint_damaged", message, "warning")
    if state is None:
        return RunState()
    reporter.event("resumed", f"Resumed at step {state.step}.", step=state.step, epoch=state.position.epoch,
                   samples=state.position.consumed)  # fmt: skip
    return state
