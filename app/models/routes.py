"""Base and trained models, on the OpenAI-compatible surface."""

from typing import Annotated

from fastapi import Path

from app.jobs.openai_schemas import ModelDeleted, ModelList, ModelResponse
from app.models import base_models, starting_models, trained_models
from app.settings import Settings
from app.storage.database import Database
from app.storage.tables import Job
from app.web.dependencies import CurrentDatabase, CurrentSettings, Reading, Slowly
from app.web.routers import openai_router
from app.web.session_route import SessionRoute

router = openai_router("/v1/models", tags=["OpenAI: models"], route_class=SessionRoute)

ModelPath = Annotated[
    str,
    Path(max_length=400, description="A name, as GET /v1/models or the list of a job's checkpoints gives it"),
]


@router.get("", summary="Base and trained models")
async def list_models(slowly: Slowly, database: CurrentDatabase, settings: CurrentSettings) -> ModelList:
    """Lists trained models, newest first (at most 1,000), then the built-in model and those of the models
    folder."""
    return await slowly(lambda: _all(database, settings))


def _all(database: Database, settings: Settings) -> ModelList:
    with database.reading() as session:
        trained = [_trained(job) for job in trained_models.jobs_with_model(session, settings)]
    return ModelList(data=trained + [_base(name) for name in base_models.local_names(settings)])


@router.get("/{model:path}", summary="A model")
def get(session: Reading, settings: CurrentSettings, model: ModelPath) -> ModelResponse:
    if model in base_models.local_names(settings):
        return _base(model)
    of_checkpoint = starting_models.job_of_checkpoint(session, settings, model)
    if of_checkpoint is not None:
        return _trained(of_checkpoint).model_copy(update={"id": model})
    return _trained(trained_models.find(session, settings, model))


@router.delete("/{model:path}", summary="Delete a trained model's files")
def delete(database: CurrentDatabase, settings: CurrentSettings, model: ModelPath) -> ModelDeleted:
    """The job that trained the model is kept, with its metrics."""
    trained_models.remove(database, settings, model)
    return ModelDeleted(id=model)


def _base(name: str) -> ModelResponse:
    return ModelResponse(id=name, created=0, owned_by="base")


def _trained(job: Job) -> ModelResponse:
    created = int(job.finished_at or job.created_at)
    name = trained_models.name_of(job)
    return ModelResponse(id=name, created=created, owned_by="accrue", parent=job.model_name, job=job.id)
