"""Log-probabilities of the data under the model that a job starts from, computed once and stored.

DPO and KTO compare with them in every window. Partial results are saved during the computation, so that
an interruption costs little. A later attempt that resumes from a checkpoint no longer has the weights that
the job started from, so it reads the file.
"""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.contract.plan import TokenBudget
from workers.run_directory import sync, write_atomically
from workers.training.data.batch_loader import lay_out
from workers.training.data.preparation import Samples
from workers.training.devices import device_errors
from workers.training.distributed.group import Group
from workers.training.exceptions import CannotTrain, Interrupted
from workers.training.micro_batches.batches import BatchLayout, cut_window
from workers.training.passes import share_of_rank
from workers.training.replica import Replica

LogProbs = npt.NDArray[np.float64]

SAVE_EVERY_SECONDS = 30.0
"""The time between saves of what is known so far."""


def reference_log_probabilities(
    folder: Path,
    key: str,
    samples: Samples,
    replica: Replica,
    layout: BatchLayout,
    tokens: int,
    group: Group,
    *,
    may_compute: bool,
    interrupted: Callable[[], bool],
    report: Callable[[int, int], None],
) -> LogProbs:
    """The log-probability of each stored sequence's targets, fp64 of shape (samples, stored sequences).

    Args:
        folder: where it is kept.
        key: identifies the data and the model (`key_of`).
        samples: with their objective.
        tokens: the maximum number of tokens of a micro-batch.
        may_compute: whether the replica still has the weights that the job starts from.
        interrupted: whether an interruption was requested.
        report: called between micro-batches with the number of samples done, and of all.

    Raises:
        CannotTrain: the file is damaged or missing, and it can no longer be computed.
        Interrupted: an interruption was requested; the next attempt goes on from what was computed.
    """
    file = folder / "reference.npy"
    precision = replica.precision if may_compute else None  # a later attempt may be on another device
    shape = samples.reference.shape
    known = _stored(file, key, precision, shape) if group.leads else np.full(shape, np.nan)
    known = _shared(known, group)
    if not np.isnan(known).any():
        return known
    if not may_compute:
        raise CannotTrain(
            "reference_missing",
            "the stored log-probabilities of the model that this job starts from are damaged, and training "
            "has changed that model since: check the disk, and submit the job again",
        )
    store = _Store(file, key, replica.precision)
    while True:
        failed = stopped = False
        try:
            stopped = _compute(known, samples, replica, layout, tokens, group, store, interrupted, report)
        except RuntimeError as error:
            if not device_errors.is_out_of_memory(error) or tokens == 1 or replica.is_sharded:
                raise
            failed = True
        known = _shared(known, group)
        if group.leads:
            store.save(known)
        failed, stopped = group.any(failed, stopped)
        if stopped:
            raise Interrupted
        if not failed:
            return known
        tokens = max(1, tokens // 2)


def key_of(samples_key: str, base_digest: str) -> str:
    """Identifies prepared data and the weights of a model."""
    return hashlib.sha256(json.dumps([samples_key, base_digest]).encode()).hexdigest()


class _Store:
    """The file, saved now and then."""

    def __init__(self, file: Path, key: str, precision: str) -> None:
        self._file, self._key, self._precision = file, key, precision
        self._saved_at = time.monotonic()

    def save_if_due(self, known: LogProbs) -> None:
        if time.monotonic() - self._saved_at >= SAVE_EVERY_SECONDS:
            self.save(known)

    def save(self, known: LogProbs) -> None:
        """Writes what is known; what is not is NaN."""
        partial = self._file.with_suffix(".partial.npy")
        np.save(partial, known)
        sync(partial)
        partial.replace(self._file)
        content = {"key": self._key, "precision": self._precision, "sha256": _digest(self._file)}
        write_atomically(self._file.with_suffix(".json"), json.dumps(content))
        self._saved_at = time.monotonic()


def _stored(file: Path, key: str, precision: str | None, shape: tuple[int, ...]) -> LogProbs:
    """What an earlier attempt has stored; NaN where it has not.

    Args:
        precision: the precision that it must have been computed in; None: any.
    """
    unknown: LogProbs = np.full(shape, np.nan)
    try:
        described = json.loads(file.with_suffix(".json").read_text())
        if (described["key"], described["sha256"]) != (key, _digest(file)):
            return unknown
        if precision is not None and described["precision"] != precision:
            return unknown
        stored: LogProbs = np.load(file)
    except (OSError, ValueError, LookupError, TypeError):
        return unknown
    return stored if stored.shape == shape else unknown


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _shared(known: LogProbs, group: Group) -> LogProbs:
    """What any rank knows, on all of them."""
    if group.size == 1:
        return known
    found = ~np.isnan(known)
    sums = group.sum(np.where(found, known, 0.0).reshape(-1).tolist())
    counts = group.sum(found.astype(np.float64).reshape(-1).tolist())
    with np.errstate(invalid="ignore", divide="ignore"):
        shared: LogProbs = (np.array(sums) / np.array(counts)).reshape(known.shape)
    return shared


def _compute(
    known: LogProbs,
    samples: Samples,
    replica: Replica,
    layout: BatchLayout,
    tokens: int,
    group: Group,
    store: _Store,
    interrupted: Callable[[], bool],
    report: Callable[[int, int], None],
) -> bool:
    """Computes what is not known, this rank's part of it, in place. Returns whether it was interrupted;
    ranks that run each pass at the same time do not look for interruptions here."""
    passes = samples.stored_sequences // samples.sequences
    was_training = replica.model.training
    replica.model.eval()
    try:
        for mismatches in (False, True)[:passes]:
            columns = [1] if mismatches else list(range(samples.sequences))
            missing = np.flatnonzero(np.isnan(known[:, columns]).any(1))
            groups = cut_window(
                samples.lengths[missing],
                TokenBudget(tokens=tokens),
                packed=layout.packed,
                separate_above=layout.separate_above,
            )
            own, counting = share_of_rank(groups, group, equally=replica.is_sharded)
            for number, each in enumerate(own):
                if not replica.is_sharded and interrupted():
                    return True
                chosen = missing[each]
                batch = lay_out(samples, chosen.tolist(), layout, mismatches=mismatches).to(replica.device)
                assert batch.scoring is not None
                scores = replica.scores(batch)[: batch.scoring.sequences].cpu().numpy()
                if not np.isfinite(scores).all():
                    raise CannotTrain(
                        "model_fails",
                        "the model that this job starts from gives some answers a log-probability that is "
                        'infinite or not a number: set mixed_precision to "no", or check the model',
                    )
                if number < counting:
                    known[chosen[:, None], columns] = scores.reshape(len(chosen), len(columns))
                if group.leads:
                    store.save_if_due(known)
                done = int((~np.isnan(known)).sum()) * group.size // known.shape[1]
                report(min(done, len(known)), len(known))
    finally:
        replica.model.train(was_training)
    return False
