"""How a request for one or several jobs is handled: checked, then stored in one transaction, then answered.

Each surface (native and OpenAI's) has its own `SubmissionHandler`, which checks a request and builds the
answer. `submit` runs a handler in a group commit with other submissions, or in a thread of its own if its
check may take long.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pydantic
from fastapi import Response

from app.contract.fail_points import fail_point
from app.datasets import content, files
from app.errors import Unavailable
from app.jobs import lifecycle, parent_jobs
from app.jobs.lifecycle import Submission
from app.planning.inputs import PlanningInputs
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database
from app.storage.group_commit import GroupCommit
from app.storage.session import Session
from app.storage.tables import Job
from app.submissions.admission import AdmittedRequest
from app.submissions.idempotency import IdempotentRequest
from app.submissions.key_limits import check_before_planning, check_limits

RunSlowly = Callable[[Callable[[], Response]], Awaitable[Response]]


class SubmissionHandler(ABC):
    """One request for a job, or for several.

    Args:
        inputs: what its plan is made from, with the database as the caller sees it.
        idempotency: the request's `Idempotency-Key`.
    """

    status = 200
    """The status of the answer, once the jobs are stored."""

    def __init__(self, inputs: PlanningInputs, settings: Settings, idempotency: IdempotentRequest) -> None:
        self.inputs = inputs
        self.settings = settings
        self._idempotency = idempotency

    @abstractmethod
    def is_slow(self) -> bool:
        """Whether `check` may take long, since it reads a dataset or queries the hub."""

    @abstractmethod
    def check(self) -> list[AdmittedRequest]:
        """The jobs to store; if there are several, all of them use stored files.

        Raises:
            AccrueError: one of them cannot be trained.
        """

    @abstractmethod
    def answer(self, session: Session, jobs: list[Job]) -> pydantic.BaseModel:
        """What the client receives, in the transaction that stores the jobs."""

    def check_in_transaction(self, session: Session) -> None:  # noqa: B027  # most have nothing to check
        """Checks what other requests may change, in the transaction that stores the jobs.

        Raises:
            AccrueError: the jobs cannot be stored.
        """

    def prepare(self) -> list[AdmittedRequest] | Response:
        """The jobs to store; or the answer that a repeated request received before, whatever has changed
        since.

        Raises:
            AccrueError: one of them cannot be trained.
        """
        with self.inputs.database.reading() as session:
            if self._idempotency.key is not None:
                answered = self._idempotency.find_answer(session)
                if answered is not None:
                    return answered
            check_before_planning(session, self.settings)
        return self.check()

    def store(self, checked: list[AdmittedRequest] | Response, database: Database) -> Response:
        """Stores all of the jobs or none, with the request's data; a repeated request gets the answer that it
        received before.

        Args:
            checked: what `prepare` returned.
            database: `inputs.database`, or the same database within a transaction shared with others.
        """
        if isinstance(checked, Response):
            return checked
        with files.incoming(self.settings) as path:
            stored = _store_data(checked[0], path, self.settings)
            duplicate_id = None if stored is None else files.find_duplicate(database, path, stored)
            if stored is not None:
                stored_files.store_file(self.settings, path)
            with database.writing() as session:
                response = self._idempotency.replay(session)
                is_repeated = response is not None
                if response is None:
                    response = self._store(session, checked, path, stored, duplicate_id)
            if is_repeated:
                files.discard(self.settings, path)  # the job stored first has its own file
        return response

    def _store(
        self,
        session: Session,
        checked: list[AdmittedRequest],
        path: Path,
        stored: content.CheckedFile | None,
        duplicate_id: str | None,
    ) -> Response:
        """Stores the jobs in a transaction. Returns the answer."""
        self.check_in_transaction(session)
        submissions = [each.submission for each in checked]
        if stored is not None:
            most = self.settings.max_stored_bytes
            submissions = [_add_file(session, checked[0], path, stored, duplicate_id, most)]
        check_limits(session, self.settings, len(submissions))
        jobs = [self._submit(session, each) for each in submissions]
        answer = self.answer(session, jobs)
        self._idempotency.remember(session, answer, self.status)
        fail_point("service.committing")
        return as_json(answer, self.status)

    def _submit(self, session: Session, submission: Submission) -> Job:
        _hold_validation_file(session, submission)
        parent_jobs.lock(session, submission.spec)
        return lifecycle.submit(session, submission)


async def submit(handler: SubmissionHandler, group: GroupCommit, slowly: RunSlowly) -> Response:
    """The answer, once the jobs are on disk.

    Args:
        slowly: runs work that may take seconds in a thread.
    """
    database = handler.inputs.database
    if handler.is_slow():  # other submissions do not wait for it
        response = await slowly(lambda: _check_and_store(handler))
    else:
        response = await group.write(database, handler.prepare, handler.store)
    fail_point("service.committed")
    return response


def _check_and_store(handler: SubmissionHandler) -> Response:
    return handler.store(handler.prepare(), handler.inputs.database)


def as_json(answer: pydantic.BaseModel, status: int) -> Response:
    return Response(answer.model_dump_json(), status, media_type="application/json")


def _store_data(checked: AdmittedRequest, path: Path, settings: Settings) -> content.CheckedFile | None:
    """Writes the samples that came with a request to a file."""
    data = checked.own_data
    if data is None:
        return None
    if isinstance(data, list):
        return content.store_lines(checked.submission.spec.data.format, data, path)
    stored = content.store_files(data, path, settings, field="dataset_config.dataset")
    if stored.sha256 != checked.submission.spec.data.sha256:
        raise Unavailable("The dataset changed while it was being read: try again.")
    return stored


def _add_file(
    session: Session,
    checked: AdmittedRequest,
    path: Path,
    stored: content.CheckedFile,
    duplicate_id: str | None,
    most_bytes: int | None,
) -> Submission:
    """Adds the file of a job's own samples. Returns the submission with that file as its data."""
    own = checked.own_data
    name = own.sources[0][1] if isinstance(own, content.DataFiles) else "texts.jsonl"
    files.add(
        session, path, stored, filename=name, purpose="fine-tune", duplicate_id=duplicate_id, inline=True,
        most_bytes=most_bytes,
    )  # fmt: skip
    spec = checked.submission.spec
    data = spec.data.model_copy(update={"file_id": path.name, "sha256": stored.sha256})
    return replace(checked.submission, spec=spec.model_copy(update={"data": data}))


def _hold_validation_file(session: Session, submission: Submission) -> None:
    """Locks the validation file until the transaction ends; no foreign key prevents its deletion."""
    validation = submission.spec.data.validation
    if validation is not None and validation.file_id is not None:
        files.hold(session, validation.file_id, "dataset_config.validation_file_id")
