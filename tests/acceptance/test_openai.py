"""The unmodified openai client against real processes."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.harness.runs import until, write_texts
from tests.harness.service import Accrue

MODEL = "accrue/tiny-gpt2"


@pytest.fixture
def client(shared: Accrue) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def training_file(client: openai.OpenAI, tmp_path: Path) -> str:
    with write_texts(tmp_path / "texts.jsonl", count=60).open("rb") as content:
        file = client.files.create(file=content, purpose="fine-tune")
    assert client.files.wait_for_processing(file.id, poll_interval=0.1).status == "processed"
    return file.id


def test_from_file_to_model(client: openai.OpenAI, shared: Accrue, training_file: str) -> None:
    created = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=training_file,
        suffix="mine",
        seed=7,
        metadata={"team": "blue"},
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"batch_size": "auto", "n_epochs": 2}},
        },
        extra_body={"dataset_config": {"max_length": 64}, "training_config": {"save_every": 1}},
    )
    assert (created.status, created.seed, created.training_file) == ("queued", 7, training_file)
    assert created.hyperparameters.batch_size == 32
    until(lambda: client.fine_tuning.jobs.retrieve(created.id).status == "succeeded", 60)
    job = client.fine_tuning.jobs.retrieve(created.id)
    assert job.fine_tuned_model is not None
    assert job.fine_tuned_model.startswith(f"ft:{MODEL}:accrue:mine:")
    assert job.trained_tokens
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))  # follows the pages
    assert "Training succeeded." in [event.message for event in events]
    assert len({event.id for event in events}) == len(events) > 4
    (newest, *_) = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert (newest.step_number, newest.fine_tuning_job_id) == (4, job.id)
    assert newest.metrics.train_loss is not None
    content = client.files.content(job.result_files[0]).text
    rows = list(csv.DictReader(io.StringIO(content)))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert client.files.retrieve(job.result_files[0]).bytes == len(content)
    assert client.models.retrieve(job.fine_tuned_model).id == job.fine_tuned_model
    checkpoint = newest.fine_tuned_model_checkpoint
    assert client.models.retrieve(checkpoint).id == checkpoint
    with pytest.raises(openai.NotFoundError, match="no checkpoint of step 99"):
        client.models.retrieve(f"{job.fine_tuned_model}:ckpt-step-99")
    assert {MODEL, job.fine_tuned_model} <= {model.id for model in client.models.list()}
    assert shared.job(job.id)["result"]["files"]
    assert client.models.delete(job.fine_tuned_model).deleted
    result = shared.job(job.id)["result"]
    assert (result["files"], result["model_path"]) == ([], None)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(job.fine_tuned_model)


@pytest.mark.thorough
def test_pause_resume_cancel_and_lists(client: openai.OpenAI, training_file: str) -> None:
    long = {"training_config": {"max_steps": 4000}, "dataset_config": {"max_length": 64}}
    requested = {"model": MODEL, "training_file": training_file, "extra_body": long}
    first = client.fine_tuning.jobs.create(**requested, metadata={"run": "a"})  # type: ignore[arg-type]
    second = client.fine_tuning.jobs.create(**requested, metadata={"run": "b"})  # type: ignore[arg-type]
    until(lambda: client.fine_tuning.jobs.retrieve(first.id).status == "running")
    client.fine_tuning.jobs.pause(first.id)
    until(lambda: str(client.fine_tuning.jobs.retrieve(first.id).status) == "paused")
    until(lambda: client.fine_tuning.jobs.retrieve(second.id).status == "running")
    until(lambda: client.fine_tuning.jobs.retrieve(second.id).estimated_finish is not None)
    client.fine_tuning.jobs.cancel(second.id)
    client.fine_tuning.jobs.resume(first.id)
    until(lambda: client.fine_tuning.jobs.retrieve(second.id).status == "cancelled")
    client.fine_tuning.jobs.cancel(first.id)
    until(lambda: client.fine_tuning.jobs.retrieve(first.id).status == "cancelled")
    assert [job.id for job in client.fine_tuning.jobs.list(limit=1)][:2] == [second.id, first.id]
    (found,) = client.fine_tuning.jobs.list(metadata={"run": "a"})
    assert found.id == first.id
    with pytest.raises(openai.ConflictError, match="has ended"):
        client.fine_tuning.jobs.pause(first.id)


def test_errors_say_what_is_wrong(client: openai.OpenAI, training_file: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.fine_tuning.jobs.create(
            model=MODEL, training_file=training_file, hyperparameters={"n_epochs": 0}
        )
    assert bad.value.code == "invalid_value"
    assert bad.value.param == "hyperparameters.n_epochs"
    assert "greater than or equal to 1" in bad.value.message
    with pytest.raises(openai.BadRequestError, match="epochs or max_steps") as bad:
        client.fine_tuning.jobs.create(
            model=MODEL,
            training_file=training_file,
            hyperparameters={"n_epochs": 2},
            extra_body={"training_config": {"max_steps": 3}},
        )
    with pytest.raises(openai.BadRequestError, match="The model gpt-4o-mini is not") as bad:
        client.fine_tuning.jobs.create(model="gpt-4o-mini", training_file=training_file)
    assert bad.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="Line 2"):
        client.files.create(file=b'{"text": "fine"}\n{"text": 3}\n', purpose="fine-tune")
    with pytest.raises(openai.NotFoundError, match="No file has the id file-0"):
        client.fine_tuning.jobs.create(model=MODEL, training_file="file-0")
    client.files.delete(training_file)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(training_file)


def test_uploaded_chats_are_returned_unchanged(client: openai.OpenAI) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
        for _ in range(3)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("chat.jsonl", content), purpose="fine-tune")
    assert client.files.content(file.id).content == content
    assert next(each.id for each in client.files.list(purpose="fine-tune")) == file.id
