"""Prometheus metrics: counts from the database at scrape time, and this process's HTTP responses."""

from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from sqlalchemy import case, func, select

from app.contract.states import JobStatus
from app.devices import gpus
from app.devices.gpus import DetectedGpu
from app.devices.live_workers import SILENT_SECONDS
from app.jobs.response_schemas import Reason
from app.jobs.waiting import WaitingReasons
from app.statistics import counters
from app.storage.database import Database, database_now
from app.storage.session import Session
from app.storage.tables import Job, Measurement, Worker
from app.usage import records

_STATES: tuple[JobStatus, ...] = get_args(JobStatus)
_REASONS: tuple[Reason, ...] = get_args(Reason)


_GPU_METRICS: dict[str, Callable[[DetectedGpu], float | None]] = {
    "memory_bytes": lambda gpu: gpu.memory_total_bytes,
    "memory_used_bytes": lambda gpu: gpu.memory_used_bytes,
    "load_ratio": lambda gpu: gpu.load,
    "temperature_celsius": lambda gpu: gpu.temperature_celsius,
}


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Exposition:
    """One service's figures."""

    def __init__(self, database: Database) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._answers = Histogram(
            "accrue_http_request_seconds",
            "Response times by method, route and status",
            ("method", "route", "status"),
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
            registry=self._registry,
        )
        self._registry.register(_FromDatabase(database))

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Records a response. `route` is a path template, which keeps the number of label values small."""
        self._answers.labels(method if method in _METHODS else "other", route, str(status)).observe(seconds)

    def text(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _FromDatabase(Collector):
    def __init__(self, database: Database) -> None:
        self._database = database

    def collect(self) -> Iterable[Metric]:
        with self._database.reading() as session:
            yield _jobs(session)
            yield _waiting(session)
            yield _oldest(session)
            yield from _counters(session)
            yield _prediction_error(session)
            yield _workers(session)
            yield _usage(session)
        yield from _gpus()


def _jobs(session: Session) -> Metric:
    family = GaugeMetricFamily("accrue_jobs", "Jobs by state", labels=["status"])
    rows = session.execute(select(Job.status, func.count()).group_by(Job.status))
    counted = {row[0]: row[1] for row in rows}
    for state in _STATES:
        family.add_metric([state], counted.get(state, 0))
    return family


def _waiting(session: Session) -> Metric:
    family = GaugeMetricFamily(
        "accrue_queue_jobs",
        "Queued jobs by what they wait for, as if each needed one device, and without regard to quotas",
        labels=["reason"],
    )
    counted = WaitingReasons(session).by_reason()
    for reason in _REASONS:
        family.add_metric([reason], counted.get(reason, 0))
    return family


def _oldest(session: Session) -> Metric:
    queued_at = case((Job.not_before > Job.created_at, Job.not_before), else_=Job.created_at)
    waits = select(database_now() - func.min(queued_at)).where(Job.status == "queued")
    since = max(0.0, session.scalar(waits) or 0.0)  # a job may wait before its next attempt
    text = (
        "Longest time that a queued job has waited, since it was submitted or last ran; 0 if none is queued"
    )
    return GaugeMetricFamily("accrue_queue_oldest_seconds", text, value=since)


def _counters(session: Session) -> Iterable[Metric]:
    counted = counters.count(session)
    seconds = CounterMetricFamily(
        "accrue_job_seconds", "From first claim to end, summed over ended jobs", labels=["status"]
    )
    for (name, label), value in counted.items():
        if name == "job_seconds":
            seconds.add_metric([label], value)
    yield seconds
    text = "Target tokens of the jobs that succeeded"
    yield CounterMetricFamily("accrue_trained_tokens", text, value=counted["trained_tokens", ""])
    text = "Times that a trainer ran out of memory, and continued in a way that needs less"
    yield CounterMetricFamily("accrue_oom_recoveries", text, value=counted["oom_recoveries", ""])


def _prediction_error(session: Session) -> Metric:
    """The errors of memory predictions, by source, from jobs that measured their peak."""
    family = GaugeMetricFamily(
        "accrue_memory_prediction_error",
        "Mean of |predicted - measured| / measured peak memory, by the prediction's source",
        labels=["source", "device"],
    )
    error = func.avg(func.abs(Measurement.predicted_bytes * 1.0 / Measurement.measured_bytes - 1.0))
    rows = session.execute(
        select(Measurement.source, Measurement.device, error)
        .where(Measurement.measured_bytes > 0)
        .group_by(Measurement.source, Measurement.device)
    )
    for source, device, value in rows:
        family.add_metric([source, device], value)
    return family


def _workers(session: Session) -> Metric:
    alive = select(func.count()).select_from(Worker)
    alive = alive.where(Worker.heartbeat_at > database_now() - SILENT_SECONDS)
    return GaugeMetricFamily("accrue_workers_alive", "Workers seen lately", value=session.scalar(alive) or 0)


def _usage(session: Session) -> Metric:
    text = "Time on devices of ended attempts, by API key; the key is empty for jobs submitted without one"
    family = CounterMetricFamily("accrue_device_seconds", text, labels=["key"])
    for owner, seconds in records.by_owner(session).items():
        family.add_metric([owner], seconds)
    return family


def _gpus() -> Iterable[Metric]:
    for name, value_of in _GPU_METRICS.items():
        family = GaugeMetricFamily(
            f"accrue_gpu_{name}", "One value per GPU of this machine", labels=["gpu", "name"]
        )
        for gpu in gpus.detected():
            value = value_of(gpu)
            if value is not None:
                family.add_metric([str(gpu.id), gpu.name], value)
        yield family
