"""The models that a job can start from: base models, and what earlier jobs have trained."""

import re
from pathlib import Path
from typing import NamedTuple

from app.contract.model_fingerprint import fingerprint_of_files
from app.contract.model_reference import LoraSpec, ModelLayer, ModelReference
from app.contract.spec import Spec
from app.contract.states import ENDED
from app.errors import NotFound, Unprocessable
from app.models import base_models, trained_models
from app.models.base_models import PlannableModel
from app.results import checkpoints
from app.settings import Settings
from app.storage import stored_files
from app.storage.database import Database
from app.storage.session import Session
from app.storage.tables import Job

_FIELD = "model_name"
_CHECKPOINT = re.compile(r"(?P<job>.+):ckpt-step-(?P<step>[0-9]{1,12})")


class _Found(NamedTuple):
    job: Job
    spec: Spec
    checkpoint: tuple[int, str] | None
    """A checkpoint's step and name; None for the model that the job saved at its end."""


def is_trained(name: str) -> bool:
    """Whether a name means a model of an earlier job."""
    return name.startswith(("ft:", "ftjob-"))


def find_model(name: str, database: Database, settings: Settings) -> tuple[ModelReference, PlannableModel]:
    """A model to train: a base model, or one that was trained here.

    Args:
        database: as the caller sees it; another key's jobs are not found.

    Raises:
        Unprocessable: there is no such model, or it cannot be trained; the message says what to do.
    """
    if not is_trained(name):
        return base_models.find_model(name, settings)
    with database.reading() as session:
        found = _find(session, settings, name)
        job = found.job
        session.expunge(job)
    return _reference(found, settings)


def find_trainable(
    name: str, database: Database, settings: Settings
) -> tuple[ModelReference, PlannableModel]:
    """What `find_model` finds, if a trainer can read its weights.

    Raises:
        Unprocessable: as in `find_model`, or the model's folder has its weights only in other formats.
    """
    found = find_model(name, database, settings)
    base_models.check_weights(name, settings)
    return found


def find_for_planning(name: str, database: Database, settings: Settings) -> PlannableModel:
    """A model's sizes; a base model in the catalogue needs no files.

    Raises:
        Unprocessable: as in `find_model`.
    """
    if is_trained(name):
        return find_model(name, database, settings)[1]
    return base_models.find_for_planning(name, settings)


def job_of_checkpoint(session: Session, settings: Settings, name: str) -> Job | None:
    """The job whose checkpoint has that name; None if it is not the name of a checkpoint.

    Raises:
        NotFound: there is no such checkpoint, or its job has not ended.
    """
    if _CHECKPOINT.fullmatch(name) is None:
        return None
    try:
        return _find(session, settings, name).job
    except Unprocessable as error:
        raise NotFound(error.message, field="model") from None


def _find(session: Session, settings: Settings, name: str) -> _Found:
    matched = _CHECKPOINT.fullmatch(name)
    job = _job(session, name if matched is None else matched["job"])
    if job is None:
        raise Unprocessable(
            f"None of your jobs made the model {name}: GET /v1/models lists trained models, and accrue jobs "
            "lists your jobs.",
            field=_FIELD,
        )
    spec = Spec.model_validate(job.spec)
    if matched is None:
        if not trained_models.has_model(job, settings):
            raise Unprocessable(_without_model(session, settings, job), field=_FIELD)
        return _Found(job, spec, None)
    if job.status not in ENDED:
        raise Unprocessable(
            f"The job {job.id} has not ended: its checkpoints can be used once it is cancelled, has failed "
            "or has succeeded.",
            field=_FIELD,
        )
    step = int(matched["step"])
    there = checkpoints.list_checkpoints(session, settings, job)
    chosen = next((each for each in there if each.step == step), None)
    if chosen is None:
        steps = ", ".join(str(each.step) for each in there) or "none"
        raise Unprocessable(
            f"The job {job.id} has no checkpoint of step {step}. Steps of its checkpoints: {steps}.",
            field=_FIELD,
        )
    return _Found(job, spec, (step, chosen.name))


def _job(session: Session, name: str) -> Job | None:
    """The job that a name means: its id, or the name of its model."""
    if name.startswith("ftjob-"):
        return session.get(Job, name)
    job = session.get(Job, f"ftjob-{name.rpartition(':')[2]}")
    return job if job is not None and trained_models.name_of(job) == name else None


def _without_model(session: Session, settings: Settings, job: Job) -> str:
    """Why a job has no model, and what can be used instead."""
    if job.status not in ENDED:
        return f"The job {job.id} has not ended yet, so there is no model to start from."
    there = checkpoints.list_checkpoints(session, settings, job)
    if not there:
        return f"The job {job.id} left neither a model nor a checkpoint."
    names = ", ".join(f"{job.id}:ckpt-step-{each.step}" for each in there)
    return f"The job {job.id} has no model. Its checkpoints can be used instead: {names}."


def _reference(found: _Found, settings: Settings) -> tuple[ModelReference, PlannableModel]:
    """The reference to what a job has trained."""
    job, spec, checkpoint = found
    name = trained_models.name_of(job) + ("" if checkpoint is None else f":ckpt-step-{checkpoint[0]}")
    lora = spec.method.lora
    if checkpoint is None and (lora is None or lora.merge):
        folder = _folder(name, settings, job.id, "model")
        base = base_models.read_folder(name, folder)
        reference = ModelReference(
            name=name,
            source="job",
            architecture=base.architecture,
            fingerprint=_fingerprint(name, folder),
            job_id=job.id,
            scores=spec.scores,
        )
        return reference, base
    place = "model" if checkpoint is None else f"checkpoints/{checkpoint[1]}"
    layer = ModelLayer(
        name=name,
        job_id=job.id,
        folder=place,
        lora=_unmerged(lora),
        fingerprint=_fingerprint(name, _folder(name, settings, job.id, place)),
    )
    continued = spec.model.continued_adapters(adapters=lora is not None)
    below = spec.model.layers[:-1] if continued is not None else spec.model.layers
    reference = spec.model.model_copy(
        update={
            "name": name,
            "base": spec.model.base_name,
            "layers": (*below, layer),
            "scores": spec.scores,
        }
    )
    return reference, _below_layers(reference, settings)


def _below_layers(reference: ModelReference, settings: Settings) -> PlannableModel:
    """The model below the layers, with its config.

    Raises:
        Unprocessable: it is no longer there.
    """
    if reference.source == "job":
        assert reference.job_id is not None
        folder = _folder(reference.name, settings, reference.job_id, "model")
        if not folder.is_dir():
            raise Unprocessable(
                f"{reference.name} needs the model of the job {reference.job_id}, which has been deleted: "
                "choose another model.",
                field=_FIELD,
            )
        return base_models.read_folder(reference.base_name, folder)
    return base_models.find_model(reference.base_name, settings)[1]


def _unmerged(lora: LoraSpec | None) -> LoraSpec | None:
    """The adapters of a checkpoint, which are merged only at the end of a job."""
    return None if lora is None else lora.model_copy(update={"merge": False})


def _folder(name: str, settings: Settings, job_id: str, place: str) -> Path:
    """A folder with a model's files that a job wrote.

    Raises:
        Unprocessable: it is a link.
    """
    try:
        return stored_files.folder_of_run(settings, job_id, *place.split("/"))
    except stored_files.LinkedFolder as error:
        raise Unprocessable(f"The model {name} cannot be used: {error}.", field=_FIELD) from None


def _fingerprint(name: str, folder: Path) -> str:
    """The fingerprint of a folder that a job wrote.

    Raises:
        Unprocessable: it cannot be read, or contains links.
    """
    try:
        if any(path.is_symlink() for path in folder.iterdir()):
            raise Unprocessable(f"The files of the model {name} contain links.", field=_FIELD)
        return fingerprint_of_files(folder)
    except OSError as error:
        raise Unprocessable(
            f"The files of the model {name} cannot be read ({error.strerror}).", field=_FIELD
        ) from None
