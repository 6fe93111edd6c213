"""Measured performance of GPUs, jobs and the service's own responses."""

from dataclasses import asdict

from fastapi import Request
from sqlalchemy import select

from app.devices import gpus
from app.statistics import performance
from app.statistics.schemas import PerformanceMetrics
from app.storage.database import Database
from app.storage.tables import Job
from app.web.dependencies import CurrentDatabase, Slowly
from app.web.latency import LatencyGauge
from app.web.routers import native_router

router = native_router(tags=["performance"])

_NEWEST = 20
"""The maximum number of jobs whose performance is shown."""


@router.get("/performance/metrics", summary="Measured performance of GPUs, jobs and API responses")
async def metrics(request: Request, slowly: Slowly, database: CurrentDatabase) -> PerformanceMetrics:
    return await slowly(lambda: _metrics(database, request.app.state.latency))


def _metrics(database: Database, latency: LatencyGauge) -> PerformanceMetrics:
    newest = select(Job).where(Job.attempt > 0).order_by(Job.id.desc()).limit(_NEWEST)
    with database.reading() as session:
        jobs = performance.performances(session, session.scalars(newest).all())
    return PerformanceMetrics(
        gpus=[asdict(gpu) for gpu in gpus.detected()], jobs=jobs, api_latency=latency.read()
    )
