"""Routes that make, show and hand out exports of trained models."""

import json
from shlex import quote
from typing import Annotated

from fastapi import Path
from fastapi.responses import Response, StreamingResponse

from app.contract.base import Page
from app.contract.export import FILES, ExportOrder, ExportResult
from app.contract.model_reference import REWARD, ModelReference
from app.contract.spec import Spec
from app.errors import Conflict, NotFound, Unprocessable
from app.exports import requests
from app.exports.schemas import (
    ExportCommands,
    ExportDeleted,
    ExportRequest,
    ExportResponse,
)
from app.jobs import transitions
from app.jobs.responses import PREFIX
from app.models import starting_models, trained_models
from app.results import run_files
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import Export
from app.web.dependencies import (
    CurrentDatabase,
    CurrentIdempotentRequest,
    CurrentSettings,
    Fetching,
    JobId,
    Reading,
    SendStream,
    Slowly,
    StreamOf,
)
from app.web.pagination import page_of
from app.web.routers import native_router
from app.web.session_route import SessionRoute

router = native_router("/training", tags=["training"], route_class=SessionRoute)

_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512, 1024)
"""The ranks that vLLM allocates adapters for (vllm/config/lora.py), and the largest that can be trained."""

ExportId = Annotated[str, Path(max_length=100, description="export-…")]


@router.post(
    "/{training_id}/exports",
    status_code=202,
    summary="Export a trained model, compared with the original",
    response_model=ExportResponse,
)
async def create(
    requested: ExportRequest,
    database: CurrentDatabase,
    settings: CurrentSettings,
    slowly: Slowly,
    training_id: JobId,
    idempotency: CurrentIdempotentRequest,
) -> ExportResponse | Response:
    """A worker makes the export, loads it as its users will, and compares its predictions on held-out samples
    with those of the trained model. Only an export that agrees succeeds."""

    def made() -> ExportResponse | Response:
        with database.reading() as session:
            if (replayed := idempotency.find_answer(session)) is not None:
                return replayed
            job = transitions.get(session, training_id)
            if job.status != "succeeded" or not trained_models.has_model(job, settings):
                raise Conflict(f"Job {training_id} has no model to export.")
            spec, name = Spec.model_validate(job.spec), trained_models.name_of(job)
        order = _order(requested, spec, name, starting_models.find_model(name, database, settings)[0])
        with database.writing() as session:
            if (replayed := idempotency.replay(session)) is not None:
                return replayed
            transitions.get(session, training_id)
            answer = _answer(requests.add(session, training_id, order))
            idempotency.remember(session, answer, 202)
            return answer

    return await slowly(made)


def _order(requested: ExportRequest, spec: Spec, name: str, model: ModelReference) -> ExportOrder:
    """The order to a worker.

    Raises:
        Unprocessable: the model has no adapters to export.
    """
    has_adapters = bool(model.layers) and model.layers[-1].lora is not None
    if requested.format == "adapter" and not has_adapters:
        raise Unprocessable(
            f"{name} is a whole model, without adapters: choose the format merged.", field="format"
        )
    if requested.format == "gguf" and model.scores:
        raise Unprocessable(
            f"{name} scores texts, which llama.cpp's converter is not known to support: choose the format "
            "merged.",
            field="format",
        )
    validation = spec.data.validation
    own_file = validation is not None and validation.file_id is not None
    data = spec.data
    if own_file:
        assert validation is not None
        changes = {"format": validation.format, "validation": validation}
        data = data.model_copy(update=changes)
    return ExportOrder(
        model=model,
        quantised_base=spec.method.name == "qlora",
        name=name,
        format=requested.format,
        type=requested.type,
        data=data,
        data_file=(validation.file_id if validation is not None else None) or data.file_id,
        seed=spec.seed,
    )


@router.get("/{training_id}/exports", summary="A job's exports, newest first")
def list_exports(session: Reading, training_id: JobId) -> Page[ExportResponse]:
    transitions.get(session, training_id)
    found = [_answer(each) for each in requests.of_job(session, training_id)]
    return page_of(found, lambda export: export.id, requests.MAX_KEPT, None)


@router.get("/{training_id}/exports/{export_id}", summary="An export")
def show(session: Reading, training_id: JobId, export_id: ExportId) -> ExportResponse:
    return _answer(_found(session, training_id, export_id))


@router.delete("/{training_id}/exports/{export_id}", summary="Delete an export")
def delete(
    database: CurrentDatabase, settings: CurrentSettings, training_id: JobId, export_id: ExportId
) -> ExportDeleted:
    """Deletes its files too; one that is being made is cancelled."""
    with database.reading() as session:
        _found(session, training_id, export_id)
    requests.remove(database, settings, training_id, export_id)
    return ExportDeleted(id=export_id)


@router.get(
    "/{training_id}/exports/{export_id}/files",
    summary="An export's files as a tar",
    response_class=StreamingResponse,
)
async def files(
    fetching: Fetching,
    database: CurrentDatabase,
    settings: CurrentSettings,
    stream: StreamOf,
    training_id: JobId,
    export_id: ExportId,
) -> Response:
    return await fetching(lambda: _files(database, settings, stream, training_id, export_id))


def _files(
    database: Database, settings: Settings, stream: SendStream, training_id: str, export_id: str
) -> Response:
    with database.reading() as session:
        export = _found(session, training_id, export_id)
        session.expunge(export)
    if export.status != "succeeded":
        raise Conflict(f"The export {export_id} has no files: its status is {export.status}.")
    named = [each.name for each in ExportResult.model_validate(export.result).files]
    if len(named) > run_files.MAX_MODEL_FILES:
        raise Conflict(f"The export {export_id} has too many files to be downloaded as one.")
    folder = stored_files.path_of_export(settings, training_id, export_id, export.attempts)
    found = run_files.open_files(folder, (FILES,), named)
    if found is None:
        raise NotFound(f"The files of the export {export_id} are no longer in the data folder.")
    return run_files.tar_response(found, export_id, stream)


def _found(session: Session, training_id: str, export_id: str) -> Export:
    """An export of a job that the caller sees.

    Raises:
        NotFound: there is none.
    """
    transitions.get(session, training_id)
    export = requests.find(session, training_id, export_id)
    if export is None:
        raise NotFound(f"Job {training_id} has no export {export_id}.")
    return export


def _answer(export: Export) -> ExportResponse:
    order = ExportOrder.model_validate(export.order)
    result = ExportResult() if export.result is None else ExportResult.model_validate(export.result)
    succeeded = export.status == "succeeded"
    return ExportResponse(
        id=export.id,
        training_id=export.job_id,
        format=order.format,
        type=result.type if succeeded else order.type,
        status=export.status,
        error=export.error,
        created_at=int(export.created_at),
        finished_at=None if export.finished_at is None else int(export.finished_at),
        files=list(result.files),
        bytes=sum(each.bytes for each in result.files),
        verification=result.verification,
        notes=[*result.notes, *_notes(order)] if succeeded else list(result.notes),
        commands=_commands(order) if succeeded else None,
        download=f"{PREFIX}/training/{export.job_id}/exports/{export.id}/files" if succeeded else None,
    )


def _notes(order: ExportOrder) -> list[str]:
    """What users of an export have to know to follow its commands."""
    if order.format != "adapter":
        return []
    base, _ = order.model.below_adapters()
    if base != order.model.base_name:
        return [
            f"These adapters were trained on {base}, which is itself a trained model. Export {base}, too, "
            "with the format merged; BASE is the folder of that export."
        ]
    if order.model.source != "hub":
        return [f"BASE is the folder of the model {base}."]
    return []


def _for_scores(order: ExportOrder) -> str:
    """Python that loads a classifier or reward model."""
    if order.format == "merged":
        made = 'from transformers import pipeline; score = pipeline("text-classification", model="DIR")'
        return made + "; score(TEXT)" if order.model.scores != (REWARD,) else f"{made}; {_OF_REWARD}"
    base, revision = order.model.below_adapters()
    is_on_hub = order.model.source == "hub" and base == order.model.base_name
    at = f', revision="{revision}"' if is_on_hub and revision else ""
    named = (f"{number}: {json.dumps(name)}" for number, name in enumerate(order.model.scores))
    return (
        "from peft import PeftModel; "
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer; "
        'tokenizer = AutoTokenizer.from_pretrained("DIR"); '
        f'base = AutoModelForSequenceClassification.from_pretrained("{base if is_on_hub else "BASE"}"{at}, '
        f"id2label={{{', '.join(named)}}}, pad_token_id=tokenizer.pad_token_id); "
        'model = PeftModel.from_pretrained(base, "DIR")'
    )


_OF_REWARD = "score(PROMPT + ANSWER + score.tokenizer.eos_token, function_to_apply='none')"


def _commands(order: ExportOrder) -> ExportCommands:
    served = order.name.replace(":", "-").replace("/", "-")
    if order.model.scores:
        return ExportCommands(transformers=_for_scores(order), vllm=None, ollama=None)
    if order.format == "adapter":
        base, revision = order.model.below_adapters()
        is_on_hub = order.model.source == "hub" and base == order.model.base_name
        named = quote(base) if is_on_hub else "BASE"
        at = f', revision="{revision}"' if is_on_hub and revision else ""
        lora = order.model.layers[-1].lora
        rank = next(each for each in _VLLM_RANKS if lora is None or lora.r <= each)
        return ExportCommands(
            transformers="from peft import PeftModel; from transformers import AutoModelForCausalLM; "
            f'base = AutoModelForCausalLM.from_pretrained("{base if is_on_hub else "BASE"}"{at}); '
            'model = PeftModel.from_pretrained(base, "DIR")',
            vllm=f"vllm serve {named}{f' --revision {quote(revision)}' if at and revision else ''} "
            f"--enable-lora --max-lora-rank {rank} --lora-modules {quote(served)}=DIR",
            ollama=None,
        )
    if order.format == "gguf":
        return ExportCommands(
            transformers="from transformers import AutoModelForCausalLM; "
            'model = AutoModelForCausalLM.from_pretrained("DIR", gguf_file="model.gguf")',
            vllm=None,
            ollama=f"ollama create {quote(served)} -f DIR/Modelfile",
        )
    return ExportCommands(
        transformers="from transformers import AutoModelForCausalLM, AutoTokenizer; "
        'model = AutoModelForCausalLM.from_pretrained("DIR"); '
        'tokenizer = AutoTokenizer.from_pretrained("DIR")',
        vllm=f"vllm serve DIR --served-model-name {quote(served)}",
        ollama=f"ollama create {quote(served)} -f DIR/Modelfile",
    )
