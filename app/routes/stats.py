"""Statistics of jobs and configurations."""

from typing import Annotated

from fastapi import APIRouter, Path

from app import configurations, jobs, stats
from app.routes.dependencies import Reading
from app.schemas.statistics import ConfigurationStatistics, JobStatistics, Totals

router = APIRouter(prefix="/stats", tags=["statistics"])


@router.get("", summary="Totals of this service")
def totals(session: Reading) -> Totals:
    return stats.totals(session)


@router.get("/{identifier}", summary="Statistics of a job or of a configuration's jobs")
def of(
    session: Reading,
    identifier: Annotated[str, Path(max_length=100, description="ftjob-… or accumulation_…")],
) -> JobStatistics | ConfigurationStatistics:
    if identifier.startswith("accumulation_"):
        return stats.of_configuration(session, configurations.find(session, identifier))
    return stats.of_job(session, jobs.get(session, identifier))
