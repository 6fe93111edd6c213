"""Every setting of the service and the worker: ACCRUE_* variables, or lines of an .env file."""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from app.contract.worker_labels import Executor, parse_labels
from app.errors import BadSetting
from app.planning.devices import Device, parse_declared

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Settings(BaseSettings):
    """Defaults work on a laptop; `.env.example` lists them all."""

    model_config = SettingsConfigDict(env_prefix="ACCRUE_", env_file=".env", extra="ignore")

    host: str = Field(
        "127.0.0.1",
        description="Address to bind to; any other than loopback requires an API key or ACCRUE_OIDC_ISSUER",
    )
    port: int = Field(8000, ge=0, le=65535)
    root_path: str = Field(
        "", pattern=r"^(/[A-Za-z0-9._~-]+)*$", description="Path under which a proxy exposes the service"
    )
    cors_origins: str = Field(
        "", description="Origins whose pages may call the service, separated by commas: https://example.org"
    )
    data_dir: Path = Field(
        Path("accrue-data"), description="Files, run directories, created models, the SQLite database"
    )
    database_url: str | None = Field(
        None, description="SQLAlchemy URL; default: accrue.db in the data folder"
    )
    object_storage: str | None = Field(
        None,
        description="Storage that all machines share instead of a data folder: s3://bucket/folder, or "
        "another URL of fsspec's",
    )
    models_dir: Path | None = Field(None, description="Local base models: a folder's name is a model's name")
    metric_programs_dir: Path | None = Field(
        None, description="Programs that score a model's completions: a file's name is a metric's name"
    )
    datasets_dir: Path | None = Field(
        None, description="Training files that requests may name: a file's name is a dataset's name"
    )
    gpus: str = Field(
        "", description="GPUs to plan for instead of the detected ones, separated by commas: 24GB,A100-80GB"
    )
    worker_labels: str = Field(
        "", description="Labels of this machine's workers, which jobs may require: zone=a,rack=3"
    )
    executor: Executor = Field(
        "local",
        description="Where this worker's trainers run: local, on this machine; slurm, ray or kubernetes, on "
        "the nodes of that engine; process, on this machine, but handled as if in an engine, to try out what "
        "an engine does",
    )
    executor_devices: str = Field(
        "",
        description="What this worker's jobs may use in the engine at the same time: A100-80GB,A100-80GB",
    )
    devices_per_node: int = Field(
        8, ge=1, le=64, description="Devices of a node of the engine; larger jobs use several nodes"
    )
    slurm_options: str = Field(
        "", description="Options of sbatch for every job: --partition=gpu --account=lab"
    )
    ray_address: str = Field(
        "http://127.0.0.1:8265", description="Address of the dashboard of the Ray cluster's head node"
    )
    kubernetes_namespace: str = Field("default", description="Namespace of the trainers' jobs")
    kubernetes_image: str = Field("", description="Image of the trainers: the worker's own image")
    kubernetes_volume: str = Field(
        "", description="Persistent volume claim that holds ACCRUE_DATA_DIR, mounted at the same path"
    )
    kubernetes_runtime: str = Field(
        "", description="Runtime of Kubeflow Trainer, for TrainJobs; empty: plain Jobs"
    )
    offline: bool = Field(
        False, description="Make no request to the Hugging Face Hub, for models or datasets"
    )
    oidc_issuer: str | None = Field(
        None, description="OpenID Connect provider whose tokens identify users, as its discovery names it"
    )
    oidc_audience: str | None = Field(None, description="Client id of this service at the provider")
    oidc_group: str | None = Field(
        None, description="Group whose members may use the service; unset: all users of the provider"
    )
    oidc_admin_group: str | None = Field(None, description="Group whose members have the scope admin")
    oidc_groups_claim: str = Field("groups", description="The claim of a token that lists a user's groups")
    trusted_proxies: str = Field(
        "",
        pattern=r"^[0-9A-Fa-f.:/, *]*$",
        description="Addresses of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted",
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="Largest JSON body")
    max_file_bytes: int = Field(512 * 2**20, ge=1024, description="Largest training file")
    max_line_bytes: int = Field(8 * 2**20, ge=1024, description="Longest line of a training file")
    max_queued_jobs: int = Field(1000, ge=1, description="Limit on the queued and paused jobs of one key")
    fair_share: bool = Field(
        False,
        description="Workers first start jobs of the key with the least device time in recent weeks; "
        "off: jobs start in the order of the queue",
    )
    preemption: bool = Field(
        False,
        description="Jobs with a lower priority are interrupted for a job with a higher one that has no "
        "device, and continue later; off: it waits until a device is free",
    )
    max_stored_bytes: int | None = Field(
        None,
        ge=0,
        description="Limit on the bytes of the files that one key stores; unset: the disk limits it",
    )
    rate_limit: str = Field(
        "6000/minute",
        pattern=r"^([1-9][0-9]{0,8}/(second|minute|hour|day))?$",
        description="Requests of one key, as in 50/second; empty: no limit",
    )
    rate_limit_storage: str = Field(
        "memory://",
        pattern=r"^(memory|rediss?|redis\+[a-z]+)://",
        description="Where requests are counted: memory://, or a Redis URL that several services share",
    )
    audit_reads: bool = Field(False, description="Record read-only requests in the audit log, too")
    audit_days: float = Field(365.0, gt=0, description="How long the audit log is kept")
    retention_days: float | None = Field(
        None,
        gt=0,
        description="Days until ended jobs, their models and unneeded files are deleted; default: never",
    )
    webhook_url: str | None = Field(
        None,
        pattern="^https?://",
        description="URL to notify when a job ends or is paused, unless the job has a URL of its own",
    )
    webhook_secret: SecretStr | None = Field(
        None, description="Secret for signing webhooks: whsec_ followed by the Base64 of at least 24 bytes"
    )
    webhook_private_addresses: bool = Field(
        False, description="Allow webhooks to loopback and to private networks"
    )
    lease_seconds: float = Field(
        15.0, gt=0, le=300, description="Seconds without a heartbeat after which a worker loses its job"
    )
    heartbeat_seconds: float = Field(3.0, gt=0)
    poll_seconds: float = Field(
        0.5,
        gt=0,
        description="How often, in seconds, a worker looks for new jobs and for output of its running ones",
    )
    stop_grace_seconds: float = Field(
        30.0,
        gt=0,
        description="Seconds for a trainer to write a checkpoint and exit before it is killed; the worker "
        "adds 20 (on a GPU, 40) for each GB of the checkpoint",
    )
    spot_notices: Literal["", "aws", "gcp", "azure"] = Field(
        "",
        description="Stop the worker, after checkpoints, when this provider gives notice that it will take "
        "the machine away",
    )
    no_progress_seconds: float = Field(
        3600.0,
        gt=0,
        description="Seconds without output after which a trainer is killed and its job is retried",
    )
    profiler: bool = Field(
        True,
        description="A worker keeps a process that simulates memory, previews data and measures the "
        "lengths of samples",
    )
    trainer_network: bool = Field(
        True,
        description="Trainers may use the network, to download models; false: they have none",
    )
    trainer_isolation: bool = Field(
        True,
        description="Hide the data folder from trainers, except for their own run and data, if the machine "
        "supports it",
    )
    fork_trainers: bool = Field(
        True,
        description="A worker keeps a process that has loaded torch and transformers, and starts trainers as "
        "copies of it; false: each trainer loads them itself, which takes some seconds",
    )
    inference: Literal["auto", "cpu", "off"] = Field(
        "auto",
        description="Where workers answer chats and completions: on a free GPU or else the CPU, only on the "
        "CPU, or not at all",
    )
    inference_models: int = Field(
        2, ge=1, le=64, description="Models that a worker keeps loaded to answer; adapters share their model"
    )
    inference_idle_seconds: float = Field(
        600.0, gt=0, description="Seconds without a request after which a model is unloaded"
    )
    inference_yields: bool = Field(
        True, description="Training has priority: a model that answers on a GPU leaves it to a queued job"
    )
    gguf_converter: str | None = Field(
        None,
        description="Path of llama.cpp's convert_hf_to_gguf.py, with which a worker exports models as GGUF",
    )
    gpu_hour_cost: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Cost of one hour on one GPU; dry runs then show the cost of a job",
    )
    cpu_threads: int | None = Field(
        None, ge=1, description="Threads of all CPU trainers together; default: all cores"
    )
    cpu_devices: int = Field(
        1,
        ge=1,
        le=64,
        description="The devices that a worker without a GPU offers: each has an equal part of the machine's "
        "memory and threads",
    )
    reserve_after_seconds: float = Field(
        60.0,
        ge=0,
        description="Seconds that a job that needs several devices waits before free devices are reserved "
        "for it",
    )
    log_level: str = "INFO"
    log_format: str = Field("console", pattern="^(console|json)$")

    max_gpu_temperature: float | None = Field(
        None,
        ge=30,
        le=150,
        description="Degrees Celsius above which training pauses until the GPU is 5 degrees below this limit",
    )

    @field_validator("gpus", "executor_devices")
    @classmethod
    def _gpus_are_understood(cls, value: str) -> str:
        parse_declared([phrase for phrase in value.split(",") if phrase.strip()])
        return value

    @field_validator("worker_labels")
    @classmethod
    def _labels_are_understood(cls, value: str) -> str:
        parse_labels(value)
        return value

    @field_validator("rate_limit_storage")
    @classmethod
    def _redis_client_is_installed(cls, value: str) -> str:
        if not value.startswith("memory:") and find_spec("redis") is None:
            raise ValueError("needs the Redis client: pip install 'accrue[redis]'")
        return value

    @field_validator("object_storage")
    @classmethod
    def _storage_can_be_used(cls, value: str | None) -> str | None:
        if value:
            from fsspec.registry import available_protocols, get_filesystem_class

            protocol, separator, _ = value.partition("://")
            try:
                if not separator or protocol not in available_protocols():
                    raise ValueError(
                        "is not a URL such as s3://bucket/folder, gs://bucket or file:///mnt/shared"
                    )
                get_filesystem_class(protocol)
            except ImportError as error:
                raise ValueError(f"needs another package: {error}") from None
        return value or None

    @field_validator("database_url")
    @classmethod
    def _url_is_understood(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                make_url(value)
            except ArgumentError:
                raise ValueError("is not a SQLAlchemy URL, such as postgresql+psycopg://…") from None
        return value

    @model_validator(mode="after")
    def _leases_outlast_heartbeats(self) -> "Settings":
        if self.lease_seconds < 2 * self.heartbeat_seconds + 1:
            raise ValueError(
                "ACCRUE_LEASE_SECONDS must be at least twice ACCRUE_HEARTBEAT_SECONDS, plus one second"
            )
        return self

    @property
    def allowed_origins(self) -> list[str]:
        """The origins in ACCRUE_CORS_ORIGINS, without trailing slashes."""
        return [origin.strip().rstrip("/") for origin in self.cors_origins.split(",") if origin.strip()]

    @property
    def declared_devices(self) -> list[Device]:
        """The devices of ACCRUE_GPUS, numbered from 0."""
        return parse_declared([phrase for phrase in self.gpus.split(",") if phrase.strip()])

    @property
    def labels(self) -> dict[str, str]:
        """The labels of ACCRUE_WORKER_LABELS."""
        return parse_labels(self.worker_labels)

    @property
    def resolved_database_url(self) -> str:
        """The database's URL."""
        return self.database_url or f"sqlite:///{(self.data_dir / 'accrue.db').absolute()}"

    @property
    def files_dir(self) -> Path:
        return self.data_dir.absolute() / "files"

    @property
    def runs_dir(self) -> Path:
        return self.data_dir.absolute() / "runs"

    @property
    def launches_dir(self) -> Path:
        """What workers and the nodes of engines tell each other (workers/executors/shared_files.py)."""
        return self.data_dir.absolute() / "launches"

    @property
    def copies_dir(self) -> Path:
        """Copies of what other machines have put into object storage; may be deleted at any time."""
        return self.data_dir.absolute() / "copies"

    @property
    def built_in_models_dir(self) -> Path:
        return self.data_dir.absolute() / "models"

    def make_directories(self) -> None:
        """Creates the data folder, readable by its owner only.

        Raises:
            BadSetting: the folder cannot be created.
        """
        try:
            for folder in (self.data_dir, self.files_dir, self.runs_dir, self.built_in_models_dir):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            message = f"ACCRUE_DATA_DIR: {self.data_dir} cannot be created: {error.strerror}"
            raise BadSetting(message) from None


@lru_cache
def get_settings() -> Settings:
    """The process's settings, read once.

    Raises:
        BadSetting: a variable has an invalid value; the message names the variable.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = f"ACCRUE_{'_'.join(map(str, first['loc'])).upper()}: " if first["loc"] else ""
        raise BadSetting(name + first["msg"].removeprefix("Value error, ")) from None
