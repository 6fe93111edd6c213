"""The application: lifespan, routers, middleware, the one error handler."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import APIRouter, FastAPI

from app import __version__, openapi, ownership, problems
from app.database import Database, migrate
from app.event_stream import EventStream
from app.latency import LatencyGauge
from app.middleware import EveryRequest
from app.problems import Problem
from app.routes import (
    accumulation,
    calculators,
    files,
    fine_tuning,
    gpus,
    metrics,
    models,
    performance,
    profiles,
    stats,
    system,
    training,
)
from app.routes.dependencies import authorised
from app.security.keys import Keyring
from app.settings import Settings, get_settings

assert ownership  # its listeners hold for every session of this process

log = structlog.get_logger("accrue.service")

_PROBLEM = {"model": Problem, "description": "What is wrong, with the field and the remedy"}


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service. Migrates its database when it starts; loads no torch."""
    settings = settings or get_settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings.make_directories()
        migrate(settings.url)
        log.info("service started", version=__version__, database=settings.url.split("@")[-1])
        yield
        app.state.database.close()

    app = FastAPI(
        title="Accrue",
        version=__version__,
        summary="Fine-tuning at the effective batch you want, on the GPU you have.",
        lifespan=lifespan,
        responses={"4XX": _PROBLEM, "5XX": _PROBLEM},
    )
    app.state.settings = settings
    app.state.database = Database(settings.url)
    app.state.keyring = Keyring(app.state.database)
    app.state.events = EventStream(app.state.database)
    app.state.latency = LatencyGauge()
    app.add_middleware(EveryRequest, settings=settings, latency=app.state.latency)
    problems.install(app)
    native = APIRouter()
    for surface in (accumulation, training, metrics, calculators, stats, performance, profiles, gpus):
        native.include_router(surface.router)
    app.include_router(native, prefix="/gradient-accumulation", dependencies=[authorised])
    app.include_router(
        native, prefix="/api/v1/gradient-accumulation", dependencies=[authorised], include_in_schema=False
    )
    for openai in (files, fine_tuning, models):
        app.include_router(openai.router, dependencies=[authorised])
    app.include_router(system.router)
    openapi.describe(app)
    return app
