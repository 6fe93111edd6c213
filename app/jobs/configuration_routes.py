"""Accumulation configurations, stored under an id."""

from collections import Counter
from typing import Annotated, Any

from fastapi import Path, Response
from fastapi.exceptions import RequestValidationError
from pydantic import AliasChoices, ValidationError
from sqlalchemy import select

from app.contract.accumulation import (
    AccumulationConfig,
    ConfigurationRequest,
    ConfigurationResponse,
    overridden,
)
from app.contract.base import Page
from app.contract.text import size_error
from app.errors import Unprocessable
from app.jobs import configurations, transitions
from app.storage.database import database_now
from app.storage.ids import new_id
from app.storage.session import Session
from app.storage.tables import Configuration, Job
from app.submissions.build_spec import resolve_batch
from app.web.dependencies import (
    AfterConfiguration,
    CurrentDatabase,
    CurrentIdempotentRequest,
    Limit,
    Reading,
    Writing,
)
from app.web.pagination import page
from app.web.routers import native_router
from app.web.session_route import SessionRoute

router = native_router(tags=["configurations"], route_class=SessionRoute)

ConfigId = Annotated[str, Path(max_length=100, description="accumulation_… or ftjob-…")]


@router.post(
    "/config", status_code=201, summary="Store a configuration", response_model=ConfigurationResponse
)
def create(
    database: CurrentDatabase, requested: ConfigurationRequest, idempotency: CurrentIdempotentRequest
) -> ConfigurationResponse | Response:
    """Checks that the numbers agree, and stores the configuration under an id."""
    with database.writing() as session:
        replayed = idempotency.replay(session)
        if replayed is not None:
            return replayed
        made = _create(session, requested)
        idempotency.remember(session, made, 201)
    return made


def _create(session: Session, requested: ConfigurationRequest) -> ConfigurationResponse:
    given = requested.model_dump(mode="json", exclude_unset=True, exclude={"num_gpus"})
    row = Configuration(
        id=new_id("accumulation"),
        created_at=session.scalar(select(database_now())),
        given=given,
        num_gpus=requested.num_gpus,
        effective_batch_size=_effective(requested),
    )
    session.add(row)
    session.flush()
    return answer(row)


def _effective(requested: ConfigurationRequest) -> int | None:
    numbers = (
        requested.target_effective_batch_size,
        requested.accumulation_steps,
        requested.micro_batch_size,
    )
    if not any(numbers):
        return None
    return resolve_batch(requested, requested.num_gpus, recommended=1).effective_batch_size


@router.get("/config", summary="List configurations")
def list_configurations(
    session: Reading, limit: Limit = 20, after: AfterConfiguration = None
) -> Page[ConfigurationResponse]:
    return page(session, select(Configuration), Configuration.id, limit, after, answer)


@router.get("/config/{config_id}", summary="Get a stored configuration, or that of a job")
def get(session: Reading, config_id: ConfigId) -> ConfigurationResponse:
    if config_id.startswith("ftjob-"):
        return _of_job(transitions.get(session, config_id))
    return answer(configurations.find(session, config_id))


@router.put("/config/{config_id}", summary="Replace a configuration")
def replace(session: Writing, config_id: ConfigId, requested: ConfigurationRequest) -> ConfigurationResponse:
    """Jobs created with the configuration keep its previous values."""
    return _change(session, config_id, requested)


@router.patch("/config/{config_id}", summary="Change some fields of a configuration")
def change(session: Writing, config_id: ConfigId, requested: dict[str, Any]) -> ConfigurationResponse:
    """Fields that are not given stay as they are."""
    if (why := size_error(requested)) is not None:
        raise Unprocessable(f"The request {why}.")
    names = Counter(_NAME_BY_ALIAS.get(name, name) for name in requested)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise Unprocessable(f"{twice} is given twice, under two of its names: leave one out.", field=twice)
    given = dict(zip(names, requested.values(), strict=True))
    row = configurations.find(session, config_id, lock=True)
    merged = overridden({**row.given, "num_gpus": row.num_gpus}, given)
    try:
        whole = ConfigurationRequest.model_validate(merged)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    return _change(session, config_id, whole)


_NAME_BY_ALIAS = {
    str(other): name
    for name, field in ConfigurationRequest.model_fields.items()
    if isinstance(field.validation_alias, AliasChoices)
    for other in field.validation_alias.choices
}
"""Maps each alias of a field to the field's name."""


def _change(session: Session, config_id: str, requested: ConfigurationRequest) -> ConfigurationResponse:
    row = configurations.find(session, config_id, lock=True)
    row.given = requested.model_dump(mode="json", exclude_unset=True, exclude={"num_gpus"})
    row.num_gpus, row.effective_batch_size = requested.num_gpus, _effective(requested)
    session.flush()
    return answer(row)


@router.delete("/config/{config_id}", status_code=204, summary="Delete a configuration")
def delete(session: Writing, config_id: ConfigId) -> None:
    """Jobs created with the configuration keep its values."""
    session.delete(configurations.find(session, config_id, lock=True))


def answer(row: Configuration) -> ConfigurationResponse:
    """A stored configuration with every default filled in."""
    config = AccumulationConfig.model_validate(row.given)
    warnings = []
    if config.clip_mode == "each_micro_batch":
        warnings.append("clip_mode each_micro_batch: the result depends on how the batch is split")
    return ConfigurationResponse(
        config_id=row.id,
        created_at=int(row.created_at),
        config=config,
        num_gpus=row.num_gpus,
        effective_batch_size=row.effective_batch_size,
        warnings=warnings,
    )


def _of_job(job: Job) -> ConfigurationResponse:
    return ConfigurationResponse(
        config_id=job.id,
        created_at=int(job.created_at),
        config=AccumulationConfig.model_validate(job.config),
        num_gpus=int(job.spec["split"]["devices"]),
        effective_batch_size=int(job.spec["effective_batch_size"]),
        warnings=list(job.plan["warnings"]),
    )
