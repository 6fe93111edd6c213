"""Measured performance of GPUs, jobs and the service's own responses."""

from dataclasses import asdict

from fastapi import APIRouter, Request
from sqlalchemy import select

from app.devices import gpus
from app.statistics import performance
from app.statistics.schemas import PerformanceMetrics
from app.storage.tables import Job
from app.web.dependencies import Reading
from app.web.sessions import SessionRoute

router = APIRouter(tags=["performance"], route_class=SessionRoute)

_NEWEST = 20
"""The maximum number of jobs whose performance is shown."""


@router.get("/performance/metrics", summary="Measured performance of GPUs, jobs and API responses")
def metrics(request: Request, session: Reading) -> PerformanceMetrics:
    newest = session.scalars(select(Job).where(Job.attempt > 0).order_by(Job.id.desc()).limit(_NEWEST)).all()
    return PerformanceMetrics(
        gpus=[asdict(gpu) for gpu in gpus.detected()],
        jobs=performance.performances(session, newest),
        api_latency=request.app.state.latency.read(),
    )
