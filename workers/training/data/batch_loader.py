"""Loads data during training: the samples of each window, and their micro-batches, one ahead."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from workers.training.data.preparation import Samples
from workers.training.micro_batches.batches import (
    BatchLayout,
    Cursor,
    Groups,
    MicroBatch,
    Row,
    Scoring,
    collate,
    epoch_order,
    window_at,
)
from workers.training.models.score_head import ends

Indices = npt.NDArray[np.int64]
_MOST_SAMPLES_READ = 20_000_000
"""How many samples' places in the order are drawn to count the windows that make no step: for seconds."""

Item = TypeVar("Item")
Ready = TypeVar("Ready")


class Loader:
    """Reads samples, and lays them into micro-batches on a device.

    Args:
        samples: the samples to train on.
        validation: the samples to evaluate on; None if none were held out.
        layout: how samples are laid out in a micro-batch; may be changed between windows.
        device: the device of the micro-batches.
        seed: the seed of the samples' order.
    """

    def __init__(
        self,
        samples: Samples,
        validation: Samples | None,
        layout: BatchLayout,
        device: torch.device,
        seed: int,
    ) -> None:
        self.samples = samples
        self.validation = validation
        self.layout = layout
        self.device = device
        self.executor: Executor = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._planned_buckets = layout.buckets
        self._seed = seed
        self._order_of_epoch: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        lengths = [
            each.lengths.max(initial=0) for each in (self.samples, self.validation) if each is not None
        ]
        return int(max(lengths))

    def window(self, cursor: Cursor, batch: int) -> Indices:
        """The samples of the window at the cursor."""
        if self._order_of_epoch[0] != cursor.epoch:
            order = epoch_order(len(self.samples), self._seed, cursor.epoch)
            self._order_of_epoch = (cursor.epoch, order)
        return window_at(cursor, self._order_of_epoch[1], batch)

    def windows_without_weight(self, batch: int, epochs: int) -> int:
        """How many windows of the whole run hold no token that counts toward the loss: they make no step. Of
        a long run, estimated from its first epochs."""
        counts = (self.samples.targets > 0) & (self.samples.weights > 0)
        if counts.all():
            return 0
        number = min(epochs, max(1, _MOST_SAMPLES_READ // len(counts)))
        first = np.arange(0, len(counts), batch)
        found = 0
        for epoch in range(number):
            ordered = counts[epoch_order(len(counts), self._seed, epoch)]
            found += int((np.add.reduceat(ordered, first, dtype=np.int64) == 0).sum())
        return found * epochs // number

    def lengths(self, window: Indices) -> Indices:
        """The length in tokens of each sample of a window, by which the window is cut."""
        lengths, sequences = self.samples.lengths[window], self.samples.sequences
        if self.layout.buckets is None:
            return lengths
        return self.layout.buckets.length(lengths // sequences) * sequences

    def fetch(self, samples: Sequence[int]) -> MicroBatch:
        """Reads samples from disk into one micro-batch on the device."""
        return self.fetch_on(self.device, samples)

    def fetch_on(self, device: torch.device, samples: Sequence[int]) -> MicroBatch:
        """A micro-batch on another device."""
        return lay_out(self.samples, samples, self.layout).to(device)

    def fetch_mismatches(self, samples: Sequence[int]) -> MicroBatch:
        """The mismatches of samples (see `Samples`) as a micro-batch on the device."""
        return lay_out(self.samples, samples, self.layout, mismatches=True).to(self.device)

    def micro_batches(self, window: Indices, groups: Groups) -> Iterator[MicroBatch]:
        """The micro-batches of a window, each prepared while the device works on the one before it."""
        return prefetched(self.executor, lambda group: self.fetch(window[group].tolist()), groups)

    def limit_buckets(self, budget: int | None) -> None:
        """Limits a compiled model's shapes to the learned token budget, which may grow again up to the
        planned size."""
        buckets, planned = self.layout.buckets, self._planned_buckets
        if buckets is not None and planned is not None and budget is not None:
            self.layout = replace(self.layout, buckets=replace(buckets, tokens=min(planned.tokens, budget)))

    def close(self) -> None:
        self.executor.shutdown(cancel_futures=True)
        self.samples.close()
        if self.validation is not None:
            self.validation.close()


def lay_out(
    samples: Samples, chosen: Sequence[int], layout: BatchLayout, *, mismatches: bool = False
) -> MicroBatch:
    """Some samples as a micro-batch, with what the samples' objective needs.

    Args:
        mismatches: lay out their mismatches instead (see `Samples`).
    """
    places = (1,) if mismatches else range(samples.sequences)
    rows = [samples.read(sample, place) for sample in chosen for place in places]
    weights = samples.weights[list(chosen)]
    if samples.scores_sequences:
        return _lay_out_scored(samples, chosen, rows, layout)
    if samples.objective is not None:  # samples without targets are not in the denominator either
        targets = samples.sequence_targets[list(chosen), 1] if mismatches else samples.targets[list(chosen)]
        weights = np.where(targets > 0, weights, np.float32(0))
    if samples.objective is None:
        return collate(rows, layout, np.repeat(weights, len(places)).tolist())
    prompts_are_targets = samples.objective.name == "orpo"
    parts = [np.full(int(counts[1:].sum()), number, np.int64) for number, (_, counts) in enumerate(rows)]
    counted = [max(1, len(part)) for part in parts]
    if prompts_are_targets:
        for number in range(0, len(rows), 2):
            tokens, counts = rows[number]
            parts[number] = np.where(counts[1:], number, len(rows) + number // 2)
            rows[number] = (tokens, np.ones_like(counts))
    batch = collate(rows, layout)
    own = samples.labels[list(chosen)] if samples.labels is not None and not mismatches else None
    scoring = Scoring(
        sequences=len(rows),
        part_of_target=torch.from_numpy(np.concatenate(parts)),
        counted=torch.tensor(counted, dtype=torch.float64),
        reference=torch.from_numpy(samples.reference[list(chosen)][:, list(places)].reshape(-1)),
        weights=torch.from_numpy(weights.astype(np.float64)),
        desirable=None if own is None else torch.from_numpy(own),
        parts=len(rows) + (len(rows) // 2 if prompts_are_targets else 0),
    )
    return replace(batch, scoring=scoring)


def _lay_out_scored(
    samples: Samples, chosen: Sequence[int], rows: Sequence[Row], layout: BatchLayout
) -> MicroBatch:
    """Some samples as a micro-batch with one target for each sequence, at the place where its score is
    read: its class, or for a reward model an unused 0."""
    batch, count = collate(rows, layout), len(rows)
    lengths = np.array(batch.lengths)
    starts = np.cumsum(lengths) - lengths if layout.packed else np.arange(count) * batch.input_ids.shape[1]
    counted = samples.targets[list(chosen)] > 0
    weights = np.where(counted, samples.weights[list(chosen)], np.float32(0))  # as in the denominator
    classes = np.zeros(count, np.int64) if samples.classes is None else samples.classes[list(chosen)]
    batch = replace(
        batch,
        target_positions=torch.from_numpy(starts + ends([tokens for tokens, _ in rows], layout.pad_id)),
        targets=torch.from_numpy(classes),
        target_counts=(1,) * count,
        weights=torch.from_numpy(weights) if samples.classes is not None and (weights != 1).any() else None,
    )
    if samples.classes is not None:
        return batch
    scoring = Scoring(
        sequences=count,
        part_of_target=torch.arange(count),
        counted=torch.ones(count, dtype=torch.float64),
        reference=torch.zeros(count, dtype=torch.float64),
        weights=torch.from_numpy(weights.astype(np.float64)),
        parts=count,
    )
    return replace(batch, scoring=scoring)


def prefetched(executor: Executor, make: Callable[[Item], Ready], items: Sequence[Item]) -> Iterator[Ready]:
    """Yields `make(item)` for each item in order. The executor's thread works one item ahead of the caller.

    An error of `make` is raised in place of its item.
    """
    coming = executor.submit(make, items[0]) if items else None
    for item in items[1:]:
        assert coming is not None
        ready, coming = coming, executor.submit(make, item)
        yield ready.result()
    if coming is not None:
        yield coming.result()
