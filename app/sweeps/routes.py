"""Routes that create and read sweeps."""

import json
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Annotated, Any

from fastapi import Path, Request, Response

from app.errors import Conflict
from app.jobs.responses import dry_run_answer
from app.models import starting_models
from app.planning.inputs import PlanningInputs
from app.settings import Settings
from app.storage.database import lock_until_commit
from app.storage.ids import new_id
from app.storage.session import Session
from app.storage.tables import Job
from app.submissions import admission
from app.submissions.admission import AdmittedRequest
from app.submissions.handler import SubmissionHandler, as_json, submit
from app.submissions.idempotency import IdempotentRequest
from app.sweeps import table
from app.sweeps.schemas import (
    MAX_JOBS,
    PlannedJob,
    SweepList,
    SweepName,
    SweepPlan,
    SweepRequest,
    SweepResponse,
)
from app.sweeps.variations import Variation, variations
from app.web.dependencies import (
    CurrentDatabase,
    CurrentIdempotentRequest,
    Listing,
    planning_inputs_of,
    slowly_of,
)
from app.web.routers import native_router

router = native_router("/sweeps", tags=["sweeps"])


@router.post(
    "",
    status_code=202,
    responses={200: {"model": SweepPlan, "description": "With dry_run: the plan of each job"}},
    summary="Create jobs that differ in a few fields",
    response_model=SweepResponse | SweepPlan,
)
async def create(
    request: Request, requested: SweepRequest, idempotency: CurrentIdempotentRequest
) -> Response:
    """Queues a job for each combination of the values in `vary`: all of them, or none. Their metadata has
    the sweep's name as `sweep`."""
    body = json.loads(await request.body())
    handler = _Handler(requested, body, planning_inputs_of(request), request.app.state.settings, idempotency)
    key_id = request.state.caller.key_id
    if key_id is not None:  # the request itself was counted before
        jobs = min(prod(map(len, requested.vary.values())), MAX_JOBS)
        await request.app.state.rates.count(key_id, jobs - 1)
    slowly = slowly_of(request)
    if requested.dry_run:
        return as_json(await slowly(handler.plan), 200)
    return await submit(handler, request.app.state.group_commit, slowly)


@router.get("", summary="List sweeps")
async def list_sweeps(database: CurrentDatabase, listing: Listing) -> SweepList:
    """The newest hundred, newest first."""

    def listed() -> SweepList:
        with database.reading() as session:
            return table.newest(session)

    return await listing(listed)


@router.get("/{sweep_name}", summary="A sweep: its jobs, and the best so far")
async def get(
    database: CurrentDatabase, listing: Listing, sweep_name: Annotated[SweepName, Path()]
) -> SweepResponse:
    """The best job is the succeeded one with the lowest validation loss, or training loss if no job has
    validation data. If a job was trained again, the newer one counts."""

    def found() -> SweepResponse:
        with database.reading() as session:
            return table.of_name(session, sweep_name)

    return await listing(found)


class _Handler(SubmissionHandler):
    status = 202

    def __init__(
        self,
        requested: SweepRequest,
        body: Mapping[str, Any],
        inputs: PlanningInputs,
        settings: Settings,
        idempotency: IdempotentRequest,
    ) -> None:
        super().__init__(inputs, settings, idempotency)
        self._requested, self._body = requested, body
        self._name = requested.name or new_id("sweep")
        self._hour_cost = settings.gpu_hour_cost

    def is_slow(self) -> bool:
        return True

    def check(self) -> list[AdmittedRequest]:
        return self._checked(self._variations(), self.inputs)

    def _variations(self) -> list[Variation]:
        return variations(self._requested, self._body, self._name)

    def _checked(self, jobs: list[Variation], inputs: PlanningInputs) -> list[AdmittedRequest]:
        find = cache(lambda name: starting_models.find_trainable(name, inputs.database, self.settings))
        return [admission.check(each.requested, inputs, self.settings, find=find) for each in jobs]

    def check_in_transaction(self, session: Session) -> None:
        lock_until_commit(session, f"sweep {session.viewer.creator} {self._name}")
        if table.exists(session, self._name):
            raise Conflict(f"You have a sweep named {self._name} already: choose another name.")

    def answer(self, session: Session, jobs: list[Job]) -> SweepResponse:
        return table.table(session, self._name, jobs)

    def plan(self) -> SweepPlan:
        """What the jobs would do."""
        jobs = self._variations()
        checked = self._checked(jobs, self.inputs.fresh())
        return SweepPlan(
            jobs=[
                PlannedJob(
                    values=job.values,
                    plan=dry_run_answer(each.submission, each.speed, each.tokens, self._hour_cost),
                )
                for job, each in zip(jobs, checked, strict=True)
            ]
        )
