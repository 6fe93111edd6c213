"""A run in progress: what it trains with, and where it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.contract.assignment import Assignment
from app.contract.plan import MicroBatchRule
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training import ramp
from workers.training.checkpoints.checkpoint_writer import CheckpointWriter
from workers.training.checkpoints.state import RunState
from workers.training.data.batch_loader import Indices, Loader
from workers.training.distributed.group import Group
from workers.training.distributed.shares import Shares
from workers.training.exceptions import InterruptionRequested
from workers.training.micro_batches.budget import Budget
from workers.training.micro_batches.trial_policy import Tuner
from workers.training.replica import Replica
from workers.training.reporting.completions import Spent
from workers.training.reporting.trackers import Trackers

Interruption = Callable[[], bool]
"""Whether an interruption was requested."""


@dataclass
class TrainingRun:
    """A run in progress, on one rank.

    It holds its inputs (assignment, run directory, reporter, interruption), the ranks that train together,
    the replica that trains, the loader of its data, its state, and what decides how windows are divided.
    State, budgets and shares are the same on all ranks.
    """

    assignment: Assignment
    run: RunDirectory
    reporter: Reporter
    trackers: Trackers
    interrupted: Interruption
    base: Path
    """The folder with the base model's staged files."""
    tokenizer: Any
    replica: Replica
    loader: Loader
    state: RunState
    budgets: list[Budget]
    """One for each rank."""
    shares: Shares
    tuner: Tuner
    group: Group
    checkpoints: CheckpointWriter
    spent_on_completions: Spent = field(default_factory=Spent)
    epoch_of_empty_window: int | None = None
    """The epoch in which this attempt last reported a window without a token that counts."""

    @property
    def budget(self) -> Budget:
        """This rank's own."""
        return self.budgets[self.group.rank]

    @property
    def batch(self) -> int:
        """The effective batch of the next window, in samples."""
        return ramp.batch_now(self.assignment.spec, self.state)

    @property
    def rule(self) -> MicroBatchRule:
        """How this rank's part of the next window is cut."""
        return self.budget.rule(self.batch)

    @property
    def steps_total(self) -> int:
        """Steps of the whole run; an estimate if the ramp follows measurements, or for more than 20 million
        samples of which some do not count."""
        planned = ramp.steps_total(self.assignment.spec, self.state, len(self.loader.samples))
        return max(planned - self._empty, 1)

    @cached_property
    def _empty(self) -> int:
        """Windows that make no step, since none of their tokens count; known if the batch is constant."""
        spec = self.assignment.spec
        if spec.max_steps is not None or spec.epochs is None or spec.ramp.name != "constant":
            return 0
        return self.loader.windows_without_weight(spec.effective_batch_size, spec.epochs)

    @property
    def finished(self) -> bool:
        epochs, progress = self.assignment.spec.epochs, self.state.progress
        if progress.stopped_early:
            return True
        return (
            self.state.position.epoch >= epochs if epochs is not None else progress.step >= self.steps_total
        )

    def next_window(self) -> Indices:
        """The samples of the window at the cursor."""
        return self.loader.window(self.state.position.cursor, self.batch)

    def seed_window(self) -> None:
        """Seeds dropout from the position in the data, so that a resume or a replay draws the same
        numbers. Ranks draw different numbers from each other."""
        cursor, rank = self.state.position.cursor, self.group.rank
        place = [self.assignment.spec.seed, cursor.epoch, cursor.consumed, *([rank] if rank else [])]
        mixed = np.random.SeedSequence(place).generate_state(1, np.uint64)
        seed = int(mixed[0]) >> 1
        if self.replica.device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.5 ms more, for CUDA
        else:
            torch.manual_seed(seed)

    def any_interruption(self) -> bool:
        """Whether an interruption was requested on any rank. Every rank calls it at the same point."""
        (interrupted,) = self.group.any(self.interrupted())
        return interrupted

    def check_interruption(self) -> None:
        """Called between micro-batches. If an interruption was requested, discards the current window
        and raises. Ranks that run each pass at the same time stop only between windows.

        Raises:
            InterruptionRequested: an interruption was requested.
        """
        self.reporter.note_work()
        if not self.replica.is_sharded and self.interrupted():
            self.replica.window.abandon()
            raise InterruptionRequested
