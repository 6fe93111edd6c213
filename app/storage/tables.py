"""The tables."""

from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, MetaData, String, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, class_mapper, mapped_column

from app.contract.data_formats import DataFormat
from app.contract.reports import Level
from app.contract.states import JobStatus, RequestedAction

Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


BY_JOB = {"sqlite_with_rowid": False}
"""Rows are stored in the order of their primary key, which begins with the job: a job's rows are adjacent."""


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: Json, list[Any]: Json}  # noqa: RUF012


class Owned:
    """A mixin for rows that belong to the key that created them (app/storage/session.py)."""

    owner: Mapped[str | None] = mapped_column()
    """The key's id, or None if the row was created without a key, by this machine's own user."""


class Configuration(Owned, Base):
    """A stored accumulation configuration, with only the fields that were given."""

    __tablename__ = "configurations"
    __table_args__ = (Index(None, "owner", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    given: Mapped[dict[str, Any]]
    num_gpus: Mapped[int]
    effective_batch_size: Mapped[int | None]


class File(Owned, Base):
    """A training file; its content is in the data folder, under its id."""

    __tablename__ = "files"
    __table_args__ = (Index(None, "owner", "id"), Index(None, "sha256"))

    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    format: Mapped[DataFormat] = mapped_column(String)
    examples: Mapped[int]
    classes: Mapped[list[Any] | None]
    """The classes of its labelled texts, in order; None if it has none, or too many."""
    inline: Mapped[bool]
    """Whether the file was made from a job's inline texts; it is deleted with that job."""


class Job(Owned, Base):
    """One training job. Only app/jobs/transitions.py and the claim in app/jobs/queue.py change its state."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "status", "place", "id", "owner"),
        Index(None, "config_id"),
        Index(None, "file_id"),
        Index(None, "validation_file_id"),
        Index(None, "owner", "id"),
        Index(None, "owner", "model_name", "user_id", "created_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    status: Mapped[JobStatus] = mapped_column(String)
    requested: Mapped[RequestedAction | None] = mapped_column(String)
    """An action that a user has requested (pause, cancel, stop) and the worker has not finished yet."""
    priority: Mapped[int]
    place: Mapped[float]
    """The place in the queue, lowest first: the time of submission, minus a bonus for priority."""
    not_before: Mapped[float]
    """The earliest time of the next claim: after a crash, the job waits."""
    preempts_after: Mapped[float | None]
    """The earliest time at which other jobs may make way for it again; null if none did yet."""

    model_name: Mapped[str]
    user_id: Mapped[Any] = mapped_column(Json, nullable=True)
    client_metadata: Mapped[dict[str, Any]]
    """The `metadata` of the submission."""
    config_id: Mapped[str | None] = mapped_column(ForeignKey("configurations.id", ondelete="SET NULL"))
    file_id: Mapped[str] = mapped_column(ForeignKey("files.id"))
    validation_file_id: Mapped[str | None]
    """The file that the job is evaluated on; null if there is none, or it is a part of the training file."""
    suffix: Mapped[str | None]
    """A part of the trained model's name, as OpenAI's clients know it."""
    webhook_url: Mapped[str | None]
    """The URL that is notified when the job ends or is paused."""
    config: Mapped[dict[str, Any]]
    training_config: Mapped[dict[str, Any]]
    spec: Mapped[dict[str, Any]]
    plan: Mapped[dict[str, Any]]

    attempt: Mapped[int]
    worker_id: Mapped[str | None]
    lease_until: Mapped[float | None]
    device: Mapped[str | None]
    device_count: Mapped[int] = mapped_column(server_default="1")
    """The number of devices that the job trains on."""
    gpu_mask: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """The only GPUs that may run the job: bit n for GPU n; 0 for any device."""
    requirements: Mapped[str] = mapped_column(server_default="{}")
    """The labels that a worker must have, as JSON; {} for none."""
    failures: Mapped[int]
    """Crashes since the last checkpoint with progress."""
    checkpoint_step: Mapped[int]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    progress: Mapped[dict[str, Any]]
    result: Mapped[Any] = mapped_column(Json, nullable=True)
    error: Mapped[Any] = mapped_column(Json, nullable=True)


def job_of(columns: Mapping[str, Any]) -> Job:
    """A read-only job that belongs to no session, with every column as it is in the database.

    The constructor, which tracks changes column by column, takes fifteen times as long.
    """
    job: Job = class_mapper(Job).class_manager.new_instance()
    job.__dict__.update(columns)
    return job


class Attempt(Base):
    """One claim of a job by one worker, with the plan that the worker made."""

    __tablename__ = "attempts"
    __table_args__ = BY_JOB

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    worker_id: Mapped[str]
    claimed_at: Mapped[float]
    ended_at: Mapped[float | None]
    plan: Mapped[Any] = mapped_column(Json, nullable=True)
    outcome: Mapped[str | None]


class JobTotals(Base):
    """Sums over a job's steps, stored when an attempt ends; a running job may already have more."""

    __tablename__ = "job_totals"
    __table_args__ = BY_JOB

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    steps: Mapped[int] = mapped_column(BigInteger)
    samples: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)
    skipped: Mapped[int] = mapped_column(BigInteger)
    seconds: Mapped[float] = mapped_column(server_default="0")
    """Seconds of its windows."""
    device_seconds: Mapped[float] = mapped_column(server_default="0")
    """Seconds of its attempts, each multiplied by its number of devices."""
    final_loss: Mapped[float | None]
    """The loss of its last step."""


class Counter(Base):
    """What deleted jobs have added to a counter that never decreases (app/statistics/counters.py)."""

    __tablename__ = "counters"

    name: Mapped[str] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(primary_key=True)
    """Empty if the counter has no label."""
    value: Mapped[float]


class StepMetric(Base):
    """One optimizer step of a job; if two attempts made the same step, the later attempt's."""

    __tablename__ = "step_metrics"
    __table_args__ = BY_JOB

    job_id: Mapped[str] = mapped_column(primary_key=True)
    """Not a foreign key: the steps of a deleted job are deleted after it, in parts (`DeletedJob`)."""
    step: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    micro_step: Mapped[int]
    batch_idx: Mapped[int]
    epoch: Mapped[int]
    samples: Mapped[int]
    loss: Mapped[float]
    loss_ema: Mapped[float]
    gradient_accumulation_steps: Mapped[int]
    effective_batch_size: Mapped[int]
    physical_batch_size: Mapped[int]
    learning_rate: Mapped[float]
    grad_norm: Mapped[float]
    tokens: Mapped[int]
    input_tokens: Mapped[int]
    padded_tokens: Mapped[int]
    tokens_per_second: Mapped[float]
    memory_gb: Mapped[float | None]
    peak_gb: Mapped[float | None]
    noise_scale: Mapped[float | None]
    skipped: Mapped[int]
    time: Mapped[float]
    data_seconds: Mapped[float]
    forward_backward_seconds: Mapped[float]
    optimizer_seconds: Mapped[float]
    synchronise_seconds: Mapped[float | None]
    temperature_celsius: Mapped[float | None]
    aux_loss: Mapped[float | None]
    largest_tokens: Mapped[int | None]
    micro_losses: Mapped[Any] = mapped_column(Json, nullable=True)
    gradient_norms: Mapped[Any] = mapped_column(Json, nullable=True)
    ranks: Mapped[Any] = mapped_column(Json, nullable=True)
    reserved_gb: Mapped[float | None]
    rewards: Mapped[Any] = mapped_column(Json, nullable=True)


class DeletedJob(Base):
    """A deleted job with steps that are still to be deleted (app/maintenance/retention.py)."""

    __tablename__ = "deleted_jobs"

    id: Mapped[str] = mapped_column(primary_key=True)


class JobEvent(Base):
    """Something that happened to a job, recorded by the service, a worker, or its trainer."""

    __tablename__ = "job_events"
    __table_args__ = (
        Index(
            "uq_job_events_job_id_line",
            "job_id",
            "line",
            unique=True,
            sqlite_where=text("line IS NOT NULL"),
            postgresql_where=text("line IS NOT NULL"),
        ),
        BY_JOB,
    )

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    line: Mapped[int | None] = mapped_column(BigInteger)
    """Byte offset of the line in events.jsonl, for events from there; a line that is read twice is stored
    once."""
    attempt: Mapped[int]
    created_at: Mapped[float]
    level: Mapped[Level] = mapped_column(String)
    type: Mapped[str]
    message: Mapped[str]
    data: Mapped[dict[str, Any]]


class Key(Base):
    """An API key, by its digest."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    digest: Mapped[str] = mapped_column(unique=True)
    """SHA-256 of the key, in hexadecimal digits; of a user of single sign-on, `oidc` and the id."""
    scopes: Mapped[list[Any]]
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]
    device_hours: Mapped[float | None]
    """The quota: hours on devices in a calendar month; None: no limit."""


class Usage(Base):
    """The time on devices of each key and day (app/usage/records.py)."""

    __tablename__ = "usage"
    __table_args__ = BY_JOB

    owner: Mapped[str] = mapped_column(primary_key=True)
    """The id of the key; empty for jobs that were submitted without one."""
    day: Mapped[int] = mapped_column(primary_key=True)
    """Days since 1970, in UTC."""
    device_seconds: Mapped[float]
    attempts: Mapped[int]


class AnsweredRequest(Base):
    """A request with an Idempotency-Key, and its answer."""

    __tablename__ = "answered_requests"

    owner: Mapped[str] = mapped_column(primary_key=True)
    """The id of the API key of the request; empty if it had none."""
    key: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column("said")
    """SHA-256 of method, path and body."""
    created_at: Mapped[float] = mapped_column(index=True)
    status: Mapped[int]
    answer: Mapped[str]


class AuditEntry(Base):
    """A request that may have changed something, or was refused (app/security/audit.py)."""

    __tablename__ = "audit"

    id: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[float]
    key_id: Mapped[str | None]
    method: Mapped[str]
    path: Mapped[str]
    status: Mapped[int]
    address: Mapped[str]
    request_id: Mapped[str]


class Delivery(Base):
    """A webhook notification to be delivered (app/webhooks)."""

    __tablename__ = "deliveries"

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[float]
    type: Mapped[str]
    url: Mapped[str]
    host: Mapped[str | None]
    """The host of the URL; None if the URL has no host, in which case nothing is delivered."""
    attempts: Mapped[int]
    not_before: Mapped[float | None] = mapped_column(index=True)
    """When the delivery is due; None once it has succeeded or was given up."""
    outcome: Mapped[str | None]
    """`delivered`, or why the last attempt failed."""


class Worker(Base):
    """A supervisor process, and what it saw of its machine at its last heartbeat."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(primary_key=True)
    hostname: Mapped[str]
    started_at: Mapped[float]
    heartbeat_at: Mapped[float]
    devices: Mapped[list[Any]]
    running: Mapped[list[Any]]
    labels: Mapped[dict[str, Any]] = mapped_column(server_default="{}")


class StoredProfile(Base):
    """The memory of a training step, as a function of its micro-batch."""

    __tablename__ = "profiles"

    id: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[float]
    model_name: Mapped[str]
    architecture: Mapped[str] = mapped_column(index=True)
    """The fingerprint of the model's config.json."""
    recipe: Mapped[dict[str, Any]]
    sequence: Mapped[int]
    torch_version: Mapped[str]
    content: Mapped[dict[str, Any]]


class ProfileRequest(Base):
    """A request for a profile; deleted once the profile is stored."""

    __tablename__ = "profile_requests"

    key: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    claimed_at: Mapped[float | None]
    requested_by: Mapped[str | None]
    """The id of the key that requested it first; None without keys."""
    model_name: Mapped[str]
    architecture: Mapped[str]
    config: Mapped[dict[str, Any]]
    recipe: Mapped[dict[str, Any]]
    sequence: Mapped[int]
    error: Mapped[str | None]
    """Why the profile cannot be made; a request with an error is not repeated."""


class PreviewRequest(Base):
    """A request to preview a file as tokens; deleted once the preview has been read."""

    __tablename__ = "preview_requests"
    __table_args__ = (Index(None, "file_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    claimed_at: Mapped[float | None]
    file_id: Mapped[str] = mapped_column(ForeignKey("files.id", ondelete="CASCADE"))
    order: Mapped[dict[str, Any]]
    answer: Mapped[Any] = mapped_column(Json, nullable=True)
    error: Mapped[str | None]
    """Why there is no answer."""


class Export(Base):
    """An export of a job's model. Its files are in the job's run directory."""

    __tablename__ = "exports"
    __table_args__ = (Index(None, "job_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[float]
    finished_at: Mapped[float | None]
    status: Mapped[str]
    """queued, running, succeeded or failed."""
    order: Mapped[dict[str, Any]]
    result: Mapped[Any] = mapped_column(Json, nullable=True)
    error: Mapped[str | None]
    claimed_at: Mapped[float | None]
    """When the process that makes it last renewed its claim."""
    claimed_by: Mapped[str | None]
    attempts: Mapped[int] = mapped_column(server_default="0")


class InferenceRequest(Base):
    """A request to a model; deleted, with the parts of the answer, once these have been read."""

    __tablename__ = "inference_requests"

    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    key_id: Mapped[str | None]
    """The id of the key of the request; None without keys."""
    awaited_at: Mapped[float]
    """When a service said last that a client awaits the answer."""
    order: Mapped[dict[str, Any]]
    claimed_at: Mapped[float | None]
    """When the inference process that works on it said so last."""
    claimed_by: Mapped[str | None]
    attempts: Mapped[int] = mapped_column(server_default="0")
    """How many times it was claimed."""


class AnswerPartRow(Base):
    """A part of an answer."""

    __tablename__ = "answer_parts"

    request_id: Mapped[str] = mapped_column(
        ForeignKey("inference_requests.id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[dict[str, Any]]


class StoredLengths(Base):
    """The lengths of a file's samples in tokens of a model, for the plans of jobs on it."""

    __tablename__ = "lengths"
    __table_args__ = (Index(None, "file_id"),)

    key: Mapped[str] = mapped_column(primary_key=True)
    file_id: Mapped[str] = mapped_column(ForeignKey("files.id", ondelete="CASCADE"))
    created_at: Mapped[float]
    content: Mapped[dict[str, Any]]


class Measurement(Base):
    """The memory that a job measured for one micro-batch size, and its prediction. The row outlives the
    job."""

    __tablename__ = "measurements"
    __table_args__ = (
        Index(None, "architecture", "device_name"),
        Index("ix_measurements_key", "key", "device_name", "created_at"),
        Index("ix_measurements_device", "device", "created_at"),
    )

    job_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[Literal["run", "sweep"]] = mapped_column(String, primary_key=True)
    tokens: Mapped[int] = mapped_column(primary_key=True)
    """The tokens of the largest micro-batch, padding included; of a size without measured memory, its
    budget."""
    created_at: Mapped[float]
    key: Mapped[str]
    """The key of the profile that predicts it."""
    architecture: Mapped[str]
    """The fingerprint of the model's config.json."""
    device: Mapped[Literal["cpu", "cuda"]] = mapped_column(String)
    device_name: Mapped[str]
    accumulating: Mapped[bool]
    """Whether the micro-batch was one of several in its step."""
    source: Mapped[str]
    """The source of the prediction: measured, simulated or formula."""
    predicted_bytes: Mapped[int] = mapped_column(BigInteger)
    measured_bytes: Mapped[int] = mapped_column(BigInteger)
    """The peak of allocated memory on a GPU, or of the whole process on a CPU; 0 if only the speed was
    measured."""
    predicted_reserved_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """What PyTorch's allocator was predicted to hold on a GPU."""
    reserved_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """The most that it held; null if it was not measured."""
    tokens_per_second: Mapped[float | None]
    """Tokens without padding, per second of forward and backward passes and, in a run, of waiting for
    data."""
