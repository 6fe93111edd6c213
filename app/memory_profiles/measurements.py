"""What jobs have measured: predicted and true memory of micro-batches, and throughput.

The measurements give the errors of predictions, the safety margin that follows from these, corrected
estimates, and the micro-batch beyond which throughput no longer grows.
"""

from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Literal

from sqlalchemy import delete, func, select

from app.contract.reports import Tuning
from app.planning.devices import GIB, Device
from app.planning.estimate import Estimate, MeasuredPeak
from app.planning.throughput import Throughput
from app.storage.database import database_now, insert_for
from app.storage.session import Session
from app.storage.tables import Job, Measurement, StepMetric

DeviceKind = Literal["cpu", "cuda"]

_SETTLED_STEPS = 3
"""The number of steps after which an attempt's peak is that of its steady state."""

_MAX_MEASUREMENTS = 200
_MIN_MEASUREMENTS = 5
"""The minimum number of measurements for a margin to be computed."""
_LEAST_MARGIN, _MOST_MARGIN = 0.03, 0.3
_MAX_ERROR_FACTOR = 3.0
"""A measured peak that differs from its prediction by a larger factor is not used."""
_PROCESS_ALLOWANCE = 2 * GIB
"""Bytes that a process may take in addition, which matter for small models."""


@dataclass(frozen=True)
class MeasuredJob:
    """What the measurements of an attempt are about: its job's recipe on a device, with its prediction."""

    job: Job
    device: Device
    sequence: int
    architecture: str
    """The fingerprint of the model's config.json."""
    key: str
    """The key of the profile."""
    estimate: Estimate

    def predicted(self, tokens: int, *, accumulating: bool) -> tuple[int, int | None]:
        """The peak of allocated memory on a GPU, or of the process on a CPU; and on a GPU, what the allocator
        holds."""
        memory = self.estimate.memory(tokens / self.sequence, accumulating=accumulating)
        if self.device.kind == "cpu":
            return memory.peak_process_bytes, None
        return memory.peak_allocated_bytes, memory.peak_reserved_bytes


def note_run(session: Session, about: MeasuredJob) -> None:
    """Stores what an attempt measured at its largest micro-batch, once it has reached its steady state."""
    own = (StepMetric.job_id == about.job.id) & (StepMetric.attempt == about.job.attempt)
    peak, reserved, tokens, steps = session.execute(
        select(
            func.max(StepMetric.peak_gb),
            func.max(StepMetric.reserved_gb),
            func.max(StepMetric.largest_tokens),
            func.count(),
        ).where(own)
    ).one()
    if not peak or tokens is None or steps < _SETTLED_STEPS:
        return
    seconds = StepMetric.data_seconds + StepMetric.forward_backward_seconds
    done, took = session.execute(
        select(func.sum(StepMetric.input_tokens), func.sum(seconds)).where(own, StepMetric.step > 1)
    ).one()
    micro_batches = session.scalar(
        select(func.max(StepMetric.gradient_accumulation_steps)).where(
            own, StepMetric.largest_tokens == tokens
        )
    )
    _keep(
        session,
        about,
        "run",
        tokens,
        micro_batches or 1,
        int(peak * GIB),
        done / took,
        None if reserved is None else int(reserved * GIB),
    )


def record_tuning(session: Session, about: MeasuredJob, tuning: Tuning) -> None:
    """Stores each micro-batch size that a tuning run, or trials during training, measured.

    It first deletes this attempt's earlier rows without measured memory. A size without measured memory is
    not stored if it is smaller than the chosen one.
    """
    earlier = delete(Measurement).where(
        Measurement.job_id == about.job.id,
        Measurement.attempt == about.job.attempt,
        Measurement.kind == "sweep",
        Measurement.measured_bytes == 0,
    )
    session.execute(earlier)
    for each in tuning.tried:
        if each.peak_bytes is None and each.token_budget < tuning.token_budget:
            continue  # plans would choose it where it is hardly slower: micro-batches would shrink job by job
        # Without its memory, a size stands for a budget, which a single long sample may exceed.
        tokens = each.token_budget if each.peak_bytes is None else each.largest_tokens
        _keep(
            session, about, "sweep", tokens, each.micro_batches, each.peak_bytes, each.tokens_per_second
        )  # fmt: skip


def points(session: Session, architecture: str, key: str, device_name: str | None) -> list[MeasuredPeak]:
    """The measured peaks of a profile's key on such a device, by increasing size; of several for one size,
    the newest."""
    query = (
        select(Measurement)
        .where(
            Measurement.architecture == architecture,
            Measurement.device_name == device_name,
            Measurement.key == key,
            Measurement.measured_bytes > 0,
        )
        .order_by(Measurement.created_at.desc())
        .limit(_MAX_MEASUREMENTS)
    )
    found: dict[int, MeasuredPeak] = {}
    for row in session.scalars(query):
        found.setdefault(row.tokens, MeasuredPeak(row.tokens, row.accumulating, row.measured_bytes))
    return [found[tokens] for tokens in sorted(found)]


def throughput(session: Session, key: str, device_name: str | None) -> Throughput | None:
    """Throughput from the newest tuning run on such a device, else from the newest job; None without
    either."""
    own = select(Measurement).where(
        Measurement.key == key,
        Measurement.device_name == device_name,
        Measurement.tokens_per_second.is_not(None),
    )
    newest = session.scalars(
        own.order_by((Measurement.kind == "sweep").desc(), Measurement.created_at.desc()).limit(1)
    ).one_or_none()
    if newest is None:
        return None
    same = own.where(
        Measurement.kind == newest.kind,
        Measurement.job_id == newest.job_id,
        Measurement.attempt == newest.attempt,
    )
    rows = session.scalars(same.order_by(Measurement.tokens)).all()
    return Throughput(tuple((row.tokens, row.tokens_per_second or 0.0) for row in rows))


def mean_error(session: Session, source: str, device: DeviceKind) -> float | None:
    """A source's mean absolute relative error on a kind of device; None if nothing was measured."""
    errors = _errors(session, source, device)
    return fmean(map(abs, errors)) if errors else None


def margin(session: Session, device: DeviceKind) -> float | None:
    """The share of a device to keep free, so that all but one in twenty of the measured jobs fit. On a GPU,
    it follows from the memory that the allocator held, since that is what runs out.

    None: too little was measured to say.
    """
    errors = _errors(session, None, device) if device == "cpu" else _errors_of_reserved(session)
    if len(errors) < _MIN_MEASUREMENTS:
        return None
    beyond = quantiles(errors, n=20, method="inclusive")[-1]
    return min(_MOST_MARGIN, max(_LEAST_MARGIN, beyond))


def _keep(
    session: Session,
    about: MeasuredJob,
    kind: Literal["run", "sweep"],
    tokens: int,
    micro_batches: int,
    measured_bytes: int | None,
    tokens_per_second: float,
    reserved_bytes: int | None = None,
) -> None:
    """Stores a measurement once per attempt and size. A repeat is ignored: by then, the prediction that it is
    compared with would already be based on the first."""
    accumulating = micro_batches > 1
    predicted, held = about.predicted(tokens, accumulating=accumulating) if tokens > 0 else (0, None)
    if not _is_plausible(about, tokens, measured_bytes, predicted):
        return
    if reserved_bytes is not None and held is not None:
        low, high = held / _MAX_ERROR_FACTOR, held * _MAX_ERROR_FACTOR + _PROCESS_ALLOWANCE
        reserved_bytes = reserved_bytes if low <= reserved_bytes <= high else None
    statement = insert_for(session, Measurement).values(
        job_id=about.job.id,
        attempt=about.job.attempt,
        kind=kind,
        tokens=tokens,
        created_at=session.scalar(select(database_now())),
        key=about.key,
        architecture=about.architecture,
        device=about.device.kind,
        device_name=about.device.name,
        accumulating=accumulating,
        source=about.estimate.source,
        predicted_bytes=predicted,
        measured_bytes=measured_bytes or 0,
        predicted_reserved_bytes=held,
        reserved_bytes=reserved_bytes,
        tokens_per_second=tokens_per_second,
    )
    session.execute(statement.on_conflict_do_nothing(index_elements=["job_id", "attempt", "kind", "tokens"]))


def _is_plausible(about: MeasuredJob, tokens: int, measured: int | None, predicted: int) -> bool:
    """Whether a measurement is plausible, since the plans of other jobs rely on it."""
    longest = int(about.job.spec["effective_batch_size"]) * about.sequence
    most = min(predicted * _MAX_ERROR_FACTOR + _PROCESS_ALLOWANCE, about.device.memory_bytes)
    is_possible = measured is None or predicted / _MAX_ERROR_FACTOR <= measured <= most
    return 0 < tokens <= 2 * longest and is_possible


def _errors_of_reserved(session: Session) -> list[float]:
    """The relative errors of what the allocator was predicted to hold on GPUs, of the newest measurements."""
    measured, predicted = Measurement.reserved_bytes, Measurement.predicted_reserved_bytes
    query = select(measured, predicted).where(Measurement.device == "cuda", measured > 0, predicted > 0)
    rows = session.execute(query.order_by(Measurement.created_at.desc()).limit(_MAX_MEASUREMENTS)).all()
    return [held / expected - 1 for held, expected in rows if held and expected]


def _errors(session: Session, source: str | None, device: DeviceKind) -> list[float]:
    """The relative errors of the newest measurements: measured / predicted - 1."""
    query = select(Measurement.measured_bytes, Measurement.predicted_bytes)
    query = query.where(
        Measurement.device == device, Measurement.predicted_bytes > 0, Measurement.measured_bytes > 0
    )
    if source is not None:
        query = query.where(Measurement.source == source)
    rows = session.execute(query.order_by(Measurement.created_at.desc()).limit(_MAX_MEASUREMENTS)).all()
    return [measured / predicted - 1 for measured, predicted in rows]
