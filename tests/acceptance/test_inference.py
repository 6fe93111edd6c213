"""Chats and completions through the unmodified openai client, with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.harness.postgresql import Server
from tests.harness.runs import until, write_texts
from tests.harness.service import Accrue, running

pytestmark = pytest.mark.thorough

MODEL = "accrue/tiny-gpt2"
HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Iterator[Accrue]:
    """A service whose worker answers requests."""
    url = server.new_database() if server is not None else None
    with running(tmp_path_factory.mktemp("accrue"), url) as accrue:
        accrue.serve()
        accrue.start("worker", ACCRUE_INFERENCE="auto")
        until(lambda: accrue.get("/gradient-accumulation/workers")["data"])
        yield accrue
    if server is not None and url is not None:
        server.drop(url)


@pytest.fixture
def client(answering: Accrue) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{answering.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tuned(answering: Accrue, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The names of a tuned model and of one with adapters."""
    folder = tmp_path_factory.mktemp("data")
    file = answering.upload(write_texts(folder / "texts.jsonl", count=40).read_bytes())
    made = []
    for method in ("full", {"lora": {"r": 4, "merge": False}}):
        training = {"max_steps": 4, "learning_rate": 1e-2, "method": method}
        job = answering.submit(dataset_config={"file_id": file, "max_length": 64}, training_config=training)
        assert answering.ended(job)["status"] == "succeeded"
        made.append(str(answering.get(f"/v1/fine_tuning/jobs/{job}")["fine_tuned_model"]))
    return made[0], made[1]


def generated(accrue: Accrue, model: str, prompt: str, count: int) -> str:
    """What transformers' own `generate` makes of a prompt."""
    base = accrue.data / "models" / MODEL
    folder = base if model == MODEL else accrue.data / "runs" / f"ftjob-{model.rpartition(':')[2]}" / "model"
    tokenizer = AutoTokenizer.from_pretrained(base)
    if (folder / "adapter_config.json").exists():
        from peft import PeftModel

        loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    options = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=256, pad_token_id=257)
    with torch.no_grad():
        made = loaded.eval().generate(
            input_ids=given, attention_mask=torch.ones_like(given), generation_config=options
        )
    return str(tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True))


def test_base_tuned_and_adapted_models_answer_as_generate(
    answering: Accrue, client: openai.OpenAI, tuned: tuple[str, str]
) -> None:
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)  # makes the built-in model
    prompts = ["one two", "def f(", "The answer"]
    texts = {}
    for model in (MODEL, *tuned):
        completed = client.completions.create(model=model, prompt=prompts, max_tokens=16, temperature=0)
        texts[model] = [choice.text for choice in completed.choices]
        assert texts[model] == [generated(answering, model, prompt, 16) for prompt in prompts]
        assert completed.usage is not None
        assert completed.usage.prompt_tokens == sum(len(prompt) for prompt in prompts)
    assert len({tuple(each) for each in texts.values()}) == 3


def test_a_chat_as_a_whole_and_as_a_stream(client: openai.OpenAI, tuned: tuple[str, str]) -> None:
    whole = client.chat.completions.create(
        model=tuned[0], messages=HELLO, max_tokens=20, temperature=0, logprobs=True, top_logprobs=2
    )
    assert whole.object == "chat.completion"
    assert whole.model == tuned[0]
    (choice,) = whole.choices
    assert choice.finish_reason in ("stop", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    streamed = list(
        client.chat.completions.create(
            model=tuned[0],
            messages=HELLO,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [each.choices[0].delta.content or "" for each in streamed if each.choices]
    assert "".join(texts) == choice.message.content
    assert streamed[0].choices[0].delta.role == "assistant"
    assert streamed[-1].usage == whole.usage
    assert streamed[-2].choices[0].finish_reason == choice.finish_reason
    assert len({each.id for each in streamed}) == 1


def test_errors_have_the_exceptions_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4o-mini") as unknown:
        client.chat.completions.create(model="gpt-4o-mini", messages=HELLO)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="context has 1024 tokens") as long:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x" * 2000}], stream=stream
            )
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match=r"tools.0.function.name"):
        client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[{"type": "function", "function": {"name": "a b"}}]
        )
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.y/z"}}]}
            ],
        )
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)


def test_nothing_of_a_request_is_kept(answering: Accrue, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a-secret-of-mine"}], max_tokens=2
    )
    from app.storage.database import Database
    from app.storage.tables import AnswerPartRow, InferenceRequest

    database = Database(answering.env.get("ACCRUE_DATABASE_URL", f"sqlite:///{answering.data}/accrue.db"))

    def rows() -> int:
        with database.reading() as session:
            return session.query(InferenceRequest).count() + session.query(AnswerPartRow).count()

    until(lambda: rows() == 0, 10)
    database.close()


def test_a_client_that_leaves_ends_its_answer(answering: Accrue, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    began = time.monotonic()
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert time.monotonic() - began < 10


def test_fifty_streams_at_once(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        chunks = client.completions.create(
            model=MODEL, prompt=f"number {number % 5}", max_tokens=30, temperature=0, stream=True
        )
        texts[number] = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(texts) == 50
    assert all(texts[number] == texts[number % 5] for number in range(50))


def processes_with(accrue: Accrue, word: bytes) -> list[int]:
    """The ids of this service's processes whose command line has a word."""
    marker = f"ACCRUE_PORT={accrue.port}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word in (entry / "cmdline").read_bytes() and marker in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_after_the_death_of_the_process_the_next_request_is_answered(
    answering: Accrue, client: openai.OpenAI
) -> None:
    def ask() -> str:
        made = client.completions.create(model=MODEL, prompt="again", max_tokens=4, temperature=0)
        return made.choices[0].text

    expected = ask()
    (dispatcher,) = processes_with(answering, b"workers.inference\0")
    os.kill(dispatcher, signal.SIGKILL)
    assert ask() == expected
    engines = [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if _parent(entry) in processes_with(answering, b"workers.inference\0")
    ]
    for engine in engines:
        os.kill(engine, signal.SIGKILL)
    assert ask() == expected


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_answers_while_a_job_trains(answering: Accrue, client: openai.OpenAI, tmp_path: Path) -> None:
    file = answering.upload(write_texts(tmp_path / "texts.jsonl", count=200).read_bytes())
    job = answering.submit(
        dataset_config={"file_id": file, "max_length": 64}, training_config={"max_steps": 3000}
    )
    until(lambda: answering.steps_logged(job) > 2, 60)
    made = client.completions.create(model=MODEL, prompt="one two", max_tokens=12, temperature=0)
    assert made.choices[0].text == generated(answering, MODEL, "one two", 12)
    assert answering.job(job)["status"] == "running"
    answering.post(f"/v1/fine_tuning/jobs/{job}/cancel")
    assert answering.ended(job)["status"] == "cancelled"


def test_from_another_folder_with_a_relative_data_folder(tmp_path: Path) -> None:
    """As `accrue up` runs with its defaults: the worker's helpers find the same data folder and .env file."""
    with running(tmp_path) as accrue:
        (tmp_path / ".env").write_text("ACCRUE_INFERENCE_MODELS=1\n")
        env = {
            **accrue.env, "ACCRUE_DATA_DIR": "data", "ACCRUE_INFERENCE": "auto", "ACCRUE_PROFILER": "true",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }  # fmt: skip
        accrue.processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "app.cli", "up"], cwd=tmp_path, env=env, start_new_session=True
            )
        )
        until(accrue.answers, 30)
        until(lambda: accrue.get("/gradient-accumulation/workers")["data"], 30)
        file = accrue.upload(write_texts(tmp_path / "texts.jsonl", count=20).read_bytes())
        training = {"max_steps": 2, "method": {"lora": {"r": 2, "merge": False}}}
        job = accrue.submit(dataset_config={"file_id": file, "max_length": 32}, training_config=training)
        assert accrue.ended(job)["status"] == "succeeded"
        made = accrue.post("/v1/completions", {"model": job, "prompt": "one", "max_tokens": 2})
        assert made["usage"]["completion_tokens"] >= 1
        preview = f"/gradient-accumulation/datasets/{file}/preview?model_name={MODEL}"
        assert accrue.get(preview)["examples"] == 20


def test_the_command_talks_to_a_model(answering: Accrue, tuned: tuple[str, str]) -> None:
    said = answering.command("chat", tuned[0], "-m", "Hi", "--max-tokens", "5", "--temperature", "0")
    assert said.returncode == 0, said.stderr
    newest = answering.command("chat", "-m", "Hi", "--max-tokens", "5", "--temperature", "0")
    assert newest.returncode == 0, newest.stderr
    wrong = answering.command("chat", "no-such-model", "-m", "Hi")
    assert wrong.returncode == 1
    assert "no-such-model" in wrong.stderr


def test_without_a_worker_the_answer_says_so(accrue: Accrue) -> None:
    accrue.serve()
    answer = accrue.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
    assert answer.status_code == 409
    assert "accrue worker" in answer.json()["detail"]
