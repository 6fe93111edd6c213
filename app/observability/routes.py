"""Health routes: whether the service is up, and whether it is ready."""

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from sqlalchemy import func, select

from app import __version__
from app.devices.live_workers import SILENT_SECONDS
from app.errors import Forbidden
from app.observability.prometheus import Exposition
from app.observability.schemas import Health, Readiness
from app.storage.database import database_now
from app.storage.migrations import current_revision, newest_revision
from app.storage.tables import Worker
from app.web.dependencies import CurrentCaller, WholeDatabase
from app.web.routers import public_router

router = public_router(tags=["system"])


@router.get("/healthz", summary="The process is up")
async def healthz() -> Health:
    return Health(status="ok", version=__version__)


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=PlainTextResponse,
)
def metrics(request: Request, caller: CurrentCaller) -> PlainTextResponse:
    """Jobs by state, queue, durations, recoveries, prediction error, workers, GPUs and HTTP responses.

    Requires the scope admin.
    """
    if not caller.may("admin"):
        raise Forbidden("These metrics cover everyone's jobs: use a key with the scope admin.")
    exposition: Exposition = request.app.state.exposition
    return PlainTextResponse(exposition.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/readyz", summary="Whether the database is reachable and migrated; the number of live workers",
            responses={503: {"model": Readiness, "description": "Not ready"}})  # fmt: skip
def readyz(database: WholeDatabase, response: Response) -> Readiness:
    """The service is ready even without a worker: it accepts jobs, and they wait in the queue."""
    database.check_not_replaced()
    migrated = current_revision(database) == newest_revision()
    with database.reading() as session:
        workers = session.scalar(
            select(func.count())
            .select_from(Worker)
            .where(Worker.heartbeat_at > database_now() - SILENT_SECONDS)
        )
    response.status_code = 200 if migrated else 503
    return Readiness(
        status="ready" if migrated else "not_ready",
        database="migrated" if migrated else "not migrated: run accrue migrate",
        workers=workers or 0,
        note=None if workers else "no worker was seen lately: jobs wait until one is started (accrue worker)",
    )
