"""The deletion of trained models, next to jobs that start from them."""

import threading

import pytest

from app.contract.architecture import BUILT_IN_MODEL
from app.contract.model_reference import ModelReference
from app.contract.spec import Spec
from app.errors import Conflict, NotFound, Unprocessable
from app.jobs import lifecycle, parent_jobs, responses, transitions
from app.models import trained_models
from app.settings import Settings
from app.storage.database import Database
from tests.harness.specs import make_spec
from tests.harness.submissions import started_from, submission, succeeded


def spec_from(database: Database, source: str) -> Spec:
    """The spec of a job that starts from the model of `source`; no job is left that does."""
    dependent = started_from(database, source)
    with database.writing() as session:
        lifecycle.cancel(session, dependent)
        model = ModelReference.model_validate(transitions.get(session, dependent).spec["model"])
        lifecycle.remove(session, dependent)
    return make_spec(model=model)


def name_of(database: Database, job_id: str) -> str:
    with database.reading() as session:
        return trained_models.name_of(transitions.get(session, job_id))


def test_a_job_does_not_start_from_a_model_whose_files_are_being_deleted(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = succeeded(database, settings)
    spec = spec_from(database, source)
    monkeypatch.setattr(trained_models, "remove_models", lambda settings, job_id: None)  # takes long
    trained_models.remove(database, settings, name_of(database, source))
    assert folder.is_dir()
    with database.writing() as session, pytest.raises(Unprocessable, match="has been deleted"):
        parent_jobs.lock(session, spec)
    with database.reading() as session:
        job = transitions.get(session, source)
        assert not trained_models.has_model(job, settings)
        assert not responses.has_model(job)
    monkeypatch.undo()
    trained_models.remove(database, settings, name_of(database, source))  # it was interrupted
    assert not folder.is_dir()
    with pytest.raises(NotFound):
        trained_models.remove(database, settings, name_of(database, source))


def test_a_model_is_found_by_its_name_and_by_its_job_s_id(database: Database, settings: Settings) -> None:
    source, _ = succeeded(database, settings)
    with database.reading() as session:
        for name in (source, trained_models.name_of(transitions.get(session, source))):
            assert trained_models.find(session, settings, name).id == source
        for name in ("ftjob-nope", source.removeprefix("ftjob-")):
            with pytest.raises(NotFound):
                trained_models.find(session, settings, name)


def test_a_model_is_deleted_by_its_job_s_id(database: Database, settings: Settings) -> None:
    source, folder = succeeded(database, settings)
    trained_models.remove(database, settings, source)
    assert not folder.exists()
    with pytest.raises(NotFound):
        trained_models.remove(database, settings, source)


def test_only_trained_models_can_be_deleted(database: Database, settings: Settings) -> None:
    with pytest.raises(NotFound, match="No model has the name"):
        trained_models.remove(database, settings, "nope")
    with pytest.raises(Conflict, match="only trained models"):
        trained_models.remove(database, settings, BUILT_IN_MODEL)


@pytest.mark.postgresql
def test_deleting_a_model_waits_for_a_job_that_starts_from_it(database: Database, settings: Settings) -> None:
    source, folder = succeeded(database, settings)
    spec, name = spec_from(database, source), name_of(database, source)
    refused: list[str] = []

    def delete() -> None:
        try:
            trained_models.remove(database, settings, name)
        except Conflict as error:
            refused.append(error.message)

    other = threading.Thread(target=delete)
    with database.writing() as session:
        parent_jobs.lock(session, spec)
        other.start()
        job = lifecycle.submit(session, submission(spec))
        other.join(0.5)
        assert other.is_alive()
    other.join(10)
    assert job.id in refused[0]
    assert folder.is_dir()
