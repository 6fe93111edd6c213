"""The application: lifespan, routers, middleware, error handlers."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.middleware.gzip import GZipMiddleware
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES

from app import __version__, logs
from app.datasets import file_routes, preview_routes
from app.devices import routes as device_routes
from app.errors import BadSetting
from app.exports import routes as export_routes
from app.inference import requests as inference_requests
from app.inference import routes as inference_routes
from app.inference.answers import AnswerReader
from app.jobs import configuration_routes, openai_routes
from app.jobs import routes as job_routes
from app.jobs.etags import AnswerCache
from app.jobs.reads import ImmediateReads
from app.maintenance.data_folder import DataFolderLock
from app.maintenance.retention import Retention
from app.memory_profiles import routes as profile_routes
from app.models import routes as model_routes
from app.observability import routes as health_routes
from app.observability.prometheus import Exposition
from app.planning import calculator_routes, catalogue_routes, recommendation_routes
from app.planning.inputs import ShortCache
from app.results import routes as result_routes
from app.security import audit_routes
from app.security.audit import AuditLog
from app.security.authentication import Authenticate, by_key
from app.security.keys import Keyring
from app.security.oidc import provider_of
from app.security.rates import RateLimiter
from app.settings import Settings, get_settings
from app.statistics import performance_routes
from app.statistics import routes as statistics_routes
from app.storage.database import Database
from app.storage.group_commit import GroupCommit
from app.storage.migrations import migrate
from app.storage.waits import WaitLimiter
from app.sweeps import routes as sweep_routes
from app.usage import routes as usage_routes
from app.web import dashboard, documentation, error_bodies, openapi
from app.web.concurrency import ConcurrencyLimit, SlowWork, ThreadTurns
from app.web.downloads import Downloads
from app.web.event_stream import EventStream
from app.web.head_requests import HeadRequests
from app.web.latency import LatencyGauge
from app.web.middleware import RequestMiddleware
from app.web.routers import add_routes
from app.webhooks import addresses
from app.webhooks.addresses import NotAllowed
from app.webhooks.deliverer import Deliverer
from app.webhooks.signature import signer

_MIN_GZIP_BYTES = 2**14
"""The smallest response, in bytes, that is compressed if the client accepts gzip."""

_MOST_DIGITS = sys.int_info.str_digits_check_threshold
"""The most digits of an integer in JSON: 640, the least that Python can be set to."""

_NOT_COMPRESSED = (*DEFAULT_EXCLUDED_CONTENT_TYPES, "application/x-tar", "application/jsonl")

log = structlog.get_logger("accrue.service")

_NATIVE = (
    job_routes,
    export_routes,
    result_routes,
    sweep_routes,
    statistics_routes,
    configuration_routes,
    calculator_routes,
    catalogue_routes,
    preview_routes,
    performance_routes,
    recommendation_routes,
    profile_routes,
    device_routes,
    audit_routes,
    usage_routes,
)
"""The most frequently called routes come first, since Starlette tries routes in order."""
_OPENAI = (file_routes, openai_routes, model_routes, inference_routes)


def create_app(settings: Settings | None = None, authenticate: Authenticate | None = None) -> FastAPI:
    """Returns the service. It migrates its database when it starts, and loads no torch.

    Args:
        authenticate: identifies the caller of each request, for an application that mounts this one and has
            its own users; it must also check the request's origin. Default: API keys or, while none exists,
            requests from this machine only.
    """
    settings = settings or get_settings()
    if not structlog.is_configured():  # structlog's defaults would show local variables, and keys in them
        logs.configure(settings.log_level, settings.log_format)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Parsing an integer takes the square of its digits, and no other thread runs meanwhile.
        sys.set_int_max_str_digits(min(sys.get_int_max_str_digits() or _MOST_DIGITS, _MOST_DIGITS))
        settings.make_directories()
        migrate(settings.resolved_database_url)
        data_folder.hold(app.state.database)
        app.state.database.fill_pool()
        with app.state.database.writing() as session:
            inference_requests.delete_abandoned(session)
        log.info(
            "service started", version=__version__, database=settings.resolved_database_url.split("@")[-1]
        )
        audit.start()
        app.state.group_commit.start()
        webhooks.start()
        retention.start()
        await app.state.rates.check()
        yield
        retention.close()
        webhooks.close()
        app.state.group_commit.close()
        audit.close()
        app.state.keyring.close()
        app.state.immediate_reads.close()
        app.state.database.close()
        data_folder.release()

    app = FastAPI(
        title="Accrue",
        version=__version__,
        summary="Fine-tuning at the effective batch you want, on the GPU you have.",
        lifespan=lifespan,
        openapi_url=None,  # documentation.py serves the document
    )
    _add_state(app, settings, authenticate)
    data_folder = DataFolderLock(settings)
    audit = AuditLog(app.state.database, settings.audit_days)
    retention = Retention(app.state.database, settings)
    webhooks = _webhooks(settings, app.state.database)
    _add_middleware(app, settings, audit, is_mounted=authenticate is not None)
    error_bodies.install(app)
    _add_routes(app)
    openapi.describe(app)
    return app


def _webhooks(settings: Settings, database: Database) -> Deliverer:
    """Returns the deliverer of webhooks.

    Raises:
        BadSetting: ACCRUE_WEBHOOK_URL is set without a secret, or is not an allowed address.
    """
    secret = settings.webhook_secret
    if secret is None and settings.webhook_url is not None:
        raise BadSetting("ACCRUE_WEBHOOK_URL needs ACCRUE_WEBHOOK_SECRET: webhooks are always signed.")
    if settings.webhook_url is not None:
        try:
            addresses.check(settings.webhook_url, private=settings.webhook_private_addresses)
        except NotAllowed as error:
            raise BadSetting(f"ACCRUE_WEBHOOK_URL: {error.message}.") from None
    signing = signer(secret.get_secret_value()) if secret is not None else None
    return Deliverer(database, signing, private_addresses=settings.webhook_private_addresses)


def _add_state(app: FastAPI, settings: Settings, authenticate: Authenticate | None) -> None:
    """Sets the application state that the routes' dependencies read."""
    state = app.state
    state.settings = settings
    state.database = Database(settings.resolved_database_url)
    state.immediate_reads = ImmediateReads(state.database)
    state.answer_cache = AnswerCache()
    state.planning_cache = ShortCache()
    state.waits = WaitLimiter()
    state.downloads = Downloads()
    state.thread_turns = ThreadTurns()
    state.slow_work, state.list_work, state.answer_work = SlowWork(), SlowWork(), SlowWork()
    state.result_work = SlowWork()
    state.comparisons = ConcurrencyLimit("comparisons", per_key=2, total=6)
    state.group_commit = GroupCommit(state.database)
    state.keyring = Keyring(state.database)
    state.authenticate = authenticate or by_key(state.keyring, provider_of(settings))
    state.rates = RateLimiter(settings.rate_limit, settings.rate_limit_storage)
    state.events = EventStream(state.database)
    state.answers = AnswerReader(state.database)
    state.inference_limit = ConcurrencyLimit(
        "requests to models", per_key=inference_routes.MAX_PER_KEY, total=inference_routes.MAX_TOTAL
    )
    state.latency = LatencyGauge()
    state.exposition = Exposition(state.database)


def _add_middleware(app: FastAPI, settings: Settings, audit: AuditLog, *, is_mounted: bool) -> None:
    app.add_middleware(HeadRequests)
    app.add_middleware(
        GZipMiddleware, minimum_size=_MIN_GZIP_BYTES, compresslevel=5, exclude_content_types=_NOT_COMPRESSED
    )
    app.add_middleware(
        RequestMiddleware,
        settings=settings,
        latency=app.state.latency,
        audit=audit,
        exposition=app.state.exposition,
        is_mounted=is_mounted,
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "Retry-After"],
        )


def _add_routes(app: FastAPI) -> None:
    for surface in (*_NATIVE, *_OPENAI, health_routes):
        add_routes(app, surface.router)
    dashboard.install(app)
    documentation.install(app)
