"""Statistics of jobs and configurations."""

from typing import Annotated, Literal

from fastapi import Path, Query, Request, Response
from pydantic import StringConstraints

from app.jobs import configurations, transitions
from app.jobs.filters import Filters
from app.results import charts
from app.results.comparison import MAX_POINTS, compare
from app.results.schemas import Comparison
from app.statistics import performance, totals
from app.statistics.schemas import ConfigurationStatistics, GroupWord, JobStatistics, Totals
from app.web.dependencies import CurrentCaller, CurrentDatabase, Slowly
from app.web.routers import native_router

router = native_router("/stats", tags=["statistics"])


@router.get("", summary="Totals of this service")
async def totals_of_service(
    slowly: Slowly,
    database: CurrentDatabase,
    filters: Filters,
    group_by: Annotated[GroupWord | None, Query(description="Also return the totals of each group")] = None,
) -> Totals:
    """Totals of all jobs; filter by `status`, `user_id`, `model`, submission (`since`, `until`)."""

    def counted() -> Totals:
        with database.connecting() as connection:
            return totals.count(connection, database.viewer.owner, filters, by=group_by)

    return await slowly(counted)  # the steps of running jobs are counted one by one


@router.get(
    "/compare",
    summary="Jobs side by side",
    response_model=Comparison,
    responses={200: {"content": {"image/png": {}}, "description": "Figures; or, with format=png, a chart"}},
)
async def compare_jobs(
    request: Request,
    slowly: Slowly,
    database: CurrentDatabase,
    caller: CurrentCaller,
    ids: Annotated[
        list[Annotated[str, StringConstraints(max_length=100)]],
        Query(min_length=2, max_length=10, description="ftjob-…; or accumulation_… for its newest job"),
    ],
    points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 200,
    format: Annotated[Literal["json", "png"], Query()] = "json",
) -> Comparison | Response:
    """Losses at equal numbers of samples seen, whatever the batch size, and how noisy each loss is."""

    def compared() -> Comparison | Response:
        with database.reading() as session:
            found = compare(session, ids, points)
        return Response(charts.comparison(found), media_type="image/png") if format == "png" else found

    with request.app.state.comparisons.counted(caller.key_id):
        return await slowly(compared)


@router.get("/{identifier}", summary="Statistics of a job or of a configuration's jobs")
async def statistics_of_job(
    slowly: Slowly,
    database: CurrentDatabase,
    identifier: Annotated[str, Path(max_length=100, description="ftjob-… or accumulation_…")],
) -> JobStatistics | ConfigurationStatistics:
    """A configuration's figures cover all of its jobs; only the newest 100 jobs are listed."""

    def found() -> JobStatistics | ConfigurationStatistics:
        with database.reading() as session:
            if identifier.startswith("accumulation_"):
                return performance.of_configuration(session, configurations.find(session, identifier))
            return performance.of_job(session, transitions.get(session, identifier))

    return await slowly(found)
