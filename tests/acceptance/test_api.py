"""The calls of API.md against real processes, and the data formats from upload to model."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.harness.runs import until
from tests.harness.service import TRAINING, Accrue, running

ROOT = "/gradient-accumulation"


@pytest.mark.alone
def test_the_service_answers_within_two_seconds_of_its_start(tmp_path: Path) -> None:
    """On an empty folder; the fastest of up to five starts, since other load can only slow a start down."""
    seconds: list[float] = []
    while len(seconds) < 5 and min(seconds, default=2.0) >= 2.0:
        folder = tmp_path / str(len(seconds))
        folder.mkdir()
        with running(folder) as accrue:
            seconds.append(accrue.serve())
    assert min(seconds) < 2.0


def test_the_documented_calls(shared: Accrue, tmp_path: Path) -> None:
    requested = {"accumulation_steps": 4, "target_effective_batch_size": 32}
    config = shared.post(f"{ROOT}/config", {**requested, "mixed_precision": True, "gradient_clipping": 1.0})
    assert config["effective_batch_size"] == 32
    data = {"texts": ["sample text 1", "sample text 2"], "max_length": 512}
    common = {
        "model_name": "accrue/tiny-gpt2",
        "training_config": {"epochs": 3, "learning_rate": 5e-5},
        "user_id": 123,
    }
    first = shared.post(
        f"{TRAINING}/with-accumulation",
        {**common, "dataset_config": data, "target_effective_batch_size": 64, "accumulation_steps": 8},
    )
    assert (first["effective_batch_size"], first["accumulation_steps"]) == (64, 8)
    second = shared.post(
        f"{TRAINING}/large-batch",
        {**common, "dataset_config": {"texts": ["…"], "max_length": 512}, "target_effective_batch_size": 128},
    )
    jobs = [shared.ended(job["training_id"]) for job in (first, second)]
    assert [job["status"] for job in jobs] == ["succeeded", "succeeded"], jobs
    job = jobs[0]
    assert job["plan"]["predicted"] is False
    assert job["device"] == "cpu"
    assert (job["progress"]["step"], job["progress"]["steps_total"]) == (3, 3)
    assert job["result"]["final_loss"] < job["result"]["first_loss"]
    assert [each["id"] for each in shared.get(TRAINING)["data"]] == [jobs[1]["id"], job["id"]]
    check_metrics(shared, job)
    check_model(shared, job, tmp_path)
    check_statistics(shared, job, config)


def check_metrics(shared: Accrue, job: Any) -> None:
    path = f"{TRAINING}/{job['id']}"
    series = shared.get(f"{path}/metrics")
    assert [point["step"] for point in series["data"]] == [1, 2, 3]
    assert len(shared.get(f"{path}/metrics?points=2")["data"]) == 2
    assert len(shared.get(f"{path}/metrics?from_step=3")["data"]) == 1
    table = shared.http.get(f"{path}/metrics?format=csv").text.splitlines()
    assert (len(table), table[0].split(",")[1]) == (4, "step")
    lines = [json.loads(line) for line in shared.http.get(f"{path}/log").text.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    documented = """step micro_step batch_idx epoch samples loss loss_ema gradient_accumulation_steps
    effective_batch_size physical_batch_size learning_rate grad_norm tokens tokens_per_second memory_gb
    peak_gb noise_scale skipped time"""
    assert set(lines[0]) >= set(documented.split())
    assert lines[0]["gradient_accumulation_steps"] == 2  # never more than the window has samples
    kinds = [event["type"] for event in shared.get(f"{path}/events?limit=100")["data"]]
    assert kinds[::-1][:2] == ["submitted", "started"]
    assert {"data", "training", "checkpoint", "saved", "succeeded"} <= set(kinds)


def check_model(shared: Accrue, job: Any, tmp_path: Path) -> None:
    answer = shared.http.get(job["links"]["model"])
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert sorted(name.split("/")[1] for name in archive.getnames()) == job["result"]["files"]
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / job["id"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(tokenizer("sample", return_tensors="pt").input_ids).logits
    assert bool(logits.isfinite().all())


def check_statistics(shared: Accrue, job: Any, config: Any) -> None:
    stats = shared.get(f"{ROOT}/stats/{job['id']}")["stats"]
    assert (stats["steps"], stats["effective_batch_size"], stats["skipped"]) == (3, 64, 0)
    assert stats["final_loss"] == job["result"]["final_loss"]
    assert stats["tokens"] == job["result"]["trained_tokens"]
    assert stats["loss_variance"] >= 0
    assert stats["prediction_error"] is not None
    assert shared.get(f"{ROOT}/stats/{config['config_id']}")["status"] == "unused"
    totals = shared.get(f"{ROOT}/stats")
    assert totals["by_status"]["succeeded"] >= 2
    assert totals["by_user"]["123"] >= 2
    measured = shared.get(f"{ROOT}/performance/metrics")
    assert any(each["training_id"] == job["id"] for each in measured["jobs"])
    assert measured["api_latency"]["p50_ms"] > 0
    advice = shared.get(f"{ROOT}/performance/recommendations?training_id={job['id']}")["advice"]
    assert advice
    assert shared.get(f"{ROOT}/workers")["data"][0]["alive"] is True
    assert [gpu["gpu_id"] for gpu in shared.get(f"{ROOT}/gpus")["declared"]] == [0, 1, 2, 3]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "line",
    [
        pytest.param({"text": "a longer text to learn"}, marks=pytest.mark.slow),
        {"prompt": "two and two is ", "completion": "four"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    ],
    ids=["text", "prompt_completion", "messages"],
)
def test_each_format_from_upload_to_model(shared: Accrue, line: dict[str, Any]) -> None:
    file_id = shared.upload((json.dumps(line) + "\n").encode() * 6)
    job_id = shared.submit(
        dataset_config={"file_id": file_id},
        training_config={"max_steps": 8, "learning_rate": 1e-2},
        target_effective_batch_size=4,
    )
    job = shared.ended(job_id)
    assert job["status"] == "succeeded", job["error"]
    assert job["result"]["final_loss"] < 0.9 * job["result"]["first_loss"]


@pytest.mark.thorough
def test_a_job_with_adapters_validation_and_the_rest_from_upload_to_result(shared: Accrue) -> None:
    lines = [{"prompt": f"{i} and 1 is ", "completion": str(i + 1), "weight": 1 + i % 2} for i in range(40)]
    file_id = shared.upload("".join(json.dumps(line) + "\n" for line in lines).encode())
    job_id = shared.submit(
        dataset_config={"file_id": file_id, "validation_split": 0.25},
        training_config={
            "max_steps": 20, "learning_rate": 1e-2, "method": {"lora": {"r": 8}}, "label_smoothing": 0.1,
            "optimizer": "lion", "lr_scheduler": "one_cycle", "eval_every": 5,
        },
        target_effective_batch_size=10, micro_batch_size=3, log_gradients=True, noise_scale_every=1,
    )  # fmt: skip
    job = shared.ended(job_id)
    assert job["status"] == "succeeded", job["error"]
    result = job["result"]
    assert result["equivalence_error"] <= 1e-5
    assert 0 < result["eval_loss"] < 6
    assert result["best_step"] in (5, 10, 15, 20)
    assert "adapter_model.safetensors" in result["files"]
    assert result["noise_scale"] is None or result["noise_scale"]["measurements"] == 20
    kinds = {event["type"] for event in shared.get(f"{TRAINING}/{job_id}/events?limit=100")["data"]}
    assert {"certificate", "evaluation", "training"} <= kinds
    log = [json.loads(line) for line in shared.http.get(f"{TRAINING}/{job_id}/log").text.splitlines()]
    assert len(log) == 20
    assert all(line["gradient_norms"] for line in log)


def test_the_openai_client_uploads_and_lists_files(shared: Accrue) -> None:
    from openai import NotFoundError, OpenAI

    client = OpenAI(base_url=f"{shared.url}/v1", api_key="none")
    file = client.files.create(file=("mine.jsonl", b'{"text": "a"}\n'), purpose="fine-tune")
    assert client.files.retrieve(file.id).filename == "mine.jsonl"
    assert client.files.content(file.id).read() == b'{"text": "a"}\n'
    assert file.id in {each.id for each in client.files.list()}
    ids = [each.id for each in client.files.list(order="asc", limit=10_000, purpose="fine-tune")]
    assert ids == sorted(ids)
    assert ids == [each.id for each in client.files.list(order="asc", limit=1, purpose="fine-tune")]
    assert ids[::-1] == [each.id for each in client.files.list(order="desc", limit=2, purpose="fine-tune")]
    assert client.files.delete(file.id).deleted
    with pytest.raises(NotFoundError, match="No file has the id"):
        client.files.retrieve(file.id)
    client.close()


@pytest.mark.thorough
def test_a_model_without_weights_fails_with_the_reason_and_the_queue_moves_on(shared: Accrue) -> None:
    folder = shared.data.parent / "models" / "empty"
    folder.mkdir(parents=True)
    config = {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 1,
        "n_positions": 32,
        "vocab_size": 9,
    }
    (folder / "config.json").write_text(json.dumps(config))
    broken = shared.submit(model_name="empty", dataset_config={"texts": ["a"]})
    good = shared.submit(dataset_config={"texts": ["a"]}, training_config={"max_steps": 1})
    failed = shared.ended(broken)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "model_not_loaded")
    assert str(shared.data.parent) not in json.dumps(failed)
    assert failed["attempt"] == 1
    assert shared.ended(good)["status"] == "succeeded"


@pytest.mark.thorough
def test_accrue_tune_measures_micro_batches_and_plans_use_the_result(shared: Accrue, tmp_path: Path) -> None:
    data = tmp_path / "book.jsonl"
    data.write_text(
        "".join(json.dumps({"text": "All work and no play. " * (1 + n % 9)}) + "\n" for n in range(60))
    )
    requested = (str(data), "--batch", "24", "--max-length", "96")
    measured = shared.command("tune", *requested)
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert "Chosen: the smallest size that is within 3% of the fastest" in measured.stdout
    (job,) = shared.get(f"{TRAINING}?limit=1")["data"]
    tuning = job["result"]["tuning"]
    assert (job["status"], job["result"]["model_path"], job["links"]["model"]) == ("succeeded", None, None)
    assert len(tuning["tried"]) > 1
    assert tuning["token_budget"] in {tried["token_budget"] for tried in tuning["tried"]}
    assert shared.http.get(f"{TRAINING}/{job['id']}/model").status_code in (404, 409)

    trained = json.loads(shared.command("submit", *requested, "--max-steps", "4", "--tune", "--json").stdout)
    ended = shared.ended(trained["id"])
    assert (ended["status"], ended["plan"]["source"]) == ("succeeded", "measured")
    budget = ended["plan"]["ranks"][0]["micro_batch_rule"]["tokens"]
    assert budget < max(96, tuning["token_budget"]) + 64  # plans round a budget up to a multiple of 64
    kinds = [event["type"] for event in shared.get(f"{TRAINING}/{trained['id']}/events?limit=100")["data"]]
    assert kinds.count("tuned") == 1


def test_the_service_works_behind_a_proxy_that_strips_a_prefix(accrue: Accrue) -> None:
    accrue.start("serve", ACCRUE_ROOT_PATH="/accrue")
    until(accrue.answers, 20)
    assert accrue.get("/openapi.json")["servers"] == [{"url": "/accrue"}]
    assert accrue.get(TRAINING)["data"] == []
