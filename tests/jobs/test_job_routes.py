from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.devices import live_workers
from app.devices.gpus import cpu_devices
from app.main import create_app
from app.planning.devices import GIB, Device
from app.settings import Settings
from app.storage.tables import Job, Worker
from tests.harness.requests import JOB, PATH, submit


def test_a_job_answers_in_the_documented_shape(client: TestClient) -> None:
    job = submit(client)
    documented = """training_id status created_at started_at finished_at model_name user_id metadata priority
    config training_config dataset device accumulation_status plan progress result error waiting links
    effective_batch_size accumulation_steps actual_batch_size_per_gpu"""
    assert set(job) >= set(documented.split())
    assert job["training_id"].startswith("ftjob-")
    assert (job["status"], job["effective_batch_size"], job["accumulation_steps"]) == ("queued", 64, 8)
    assert job["actual_batch_size_per_gpu"] == 8
    assert job["plan"]["predicted"] is True
    assert job["plan"]["steps_total"] == 3
    assert job["waiting"] == {"reason": "no_worker", "queue_position": 1, "predicted_start": None}
    assert set(job["accumulation_status"]) == {
        "enabled", "steps", "effective_batch_size", "sync_gradients", "clip_before_accumulation",
        "accumulate_on_cpu", "accumulation_step",
    }  # fmt: skip
    assert client.get(job["links"]["self"]).json()["id"] == job["id"]
    assert any("fewer than the effective batch" in warning for warning in job["plan"]["warnings"])


def test_large_batch_plans_the_steps(client: TestClient) -> None:
    body = {name: value for name, value in JOB.items() if name != "accumulation_steps"}
    job = client.post(f"{PATH}/large-batch", json={**body, "target_effective_batch_size": 128}).json()
    assert job["effective_batch_size"] == 128
    assert job["plan"]["ranks"][0]["micro_batch_rule"]["rule"] == "token_budget"
    refused = client.post(f"{PATH}/large-batch", json={**body, "accumulation_steps": 8})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "accumulation_steps")


def test_the_versioned_path_is_the_same(client: TestClient) -> None:
    answer = client.post(f"/api/v1{PATH}/with-accumulation", json=JOB)
    assert answer.status_code == 202
    assert client.get(f"/api/v1{PATH}/{answer.json()['id']}").status_code == 200


def test_a_dry_run_returns_a_plan_and_stores_nothing(client: TestClient, settings: Settings) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "dry_run": True})
    assert answer.status_code == 200
    assert answer.json()["plan"]["micro_batches"] == 8
    assert nothing_is_left(client, settings)


def nothing_is_left(client: TestClient, settings: Settings) -> bool:
    return not client.get(PATH).json()["data"] and not list(settings.files_dir.iterdir())


@pytest.mark.parametrize(
    ("changes", "status", "field", "remedy"),
    [
        ({"model_name": "no/such-model"}, 422, "model_name", "ACCRUE_MODELS_DIR"),
        ({"model_name": "../../etc/passwd"}, 422, "model_name", ""),
        ({"dataset_config": {"texts": []}}, 422, "dataset_config", "at least one sample"),
        ({"dataset_config": {}}, 422, "dataset_config", "exactly one of texts, prompts, messages"),
        ({"dataset_config": {"file_id": "file-nope"}}, 404, "dataset_config.file_id", "POST /v1/files"),
        ({"dataset_config": {"texts": ["a"], "max_length": 4096}}, 422, "dataset_config.max_length",
         "accrue/tiny-gpt2's context of 1024 tokens: lower it"),
        ({"accumulation_steps": -3}, 422, "accumulation_steps", "greater than or equal to 1"),
        ({"training_config": {"max_steps": -3}}, 422, "training_config.max_steps", "greater than or equal"),
        ({"accumulation_stepz": 3}, 422, "accumulation_stepz", "is not a field of this request"),
        ({"training_config": {"lr": 1}}, 422, "training_config.lr", "is not a field of this request"),
        ({"micro_batch_size": 3}, 422, "accumulation_steps", "takes 22 accumulation steps, not 8"),
        ({"model_name": "foo--bar"}, 422, "model_name", "ACCRUE_MODELS_DIR"),
        ({"target_effective_batch_size": None, "accumulation_steps": 4096, "micro_batch_size": 99999,
          "num_gpus": 1024}, 422, "accumulation_steps", "more than 1000000"),
        ({"user_id": 2**70}, 422, "user_id", ""),
        ({"user_id": "\ud800"}, 422, "user_id", ""),
        ({"user_id": True}, 422, "user_id", ""),
        ({"mixed_precision": "fp8"}, 422, "mixed_precision", ""),
        ({"gradient_accumulation_steps": 8}, 422, "gradient_accumulation_steps", "another name for"),
        ({"gpu_ids": [9]}, 422, "gpu_ids", "Available: 0"),
        ({"gpu_ids": [0, 0]}, 422, "body", "names a GPU twice"),
        ({"config_id": "accumulation_nope"}, 404, "config_id", "No configuration"),
        ({"use_gradient_accumulation": False}, 422, "use_gradient_accumulation", "set it to true"),
        ({"training_config": {"learning_rate": 1e400}}, 422, "training_config.learning_rate", ""),
    ],
)  # fmt: skip
def test_bad_input_gets_an_error_with_field_and_remedy_and_stores_nothing(
    client: TestClient, settings: Settings, changes: dict[str, Any], status: int, field: str, remedy: str
) -> None:
    import json

    answer = client.post(
        f"{PATH}/with-accumulation",
        content=json.dumps({**JOB, **changes}),
        headers={"content-type": "application/json"},
    )
    body = answer.json()
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert body["error"]["param"] == field
    assert remedy in body["detail"]
    assert body["detail"] == body["error"]["message"]
    assert (body["status"], body["instance"]) == (status, f"{PATH}/with-accumulation")
    assert body["errors"][0]["field"] == field
    assert answer.headers["x-request-id"]
    assert nothing_is_left(client, settings)


def test_broken_json_gets_a_clear_error(client: TestClient) -> None:
    answer = client.post(
        f"{PATH}/with-accumulation", content=b'{"model_name": ', headers={"content-type": "application/json"}
    )
    assert answer.status_code == 422
    assert "is not valid JSON" in answer.json()["detail"]


def test_a_body_of_100_mb_is_refused_before_it_is_read(client: TestClient, settings: Settings) -> None:
    answer = client.post(
        f"{PATH}/with-accumulation", content=b" " * 100_000_000, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413
    assert "POST /v1/files" in answer.json()["detail"]
    assert nothing_is_left(client, settings)


def test_the_size_limit_holds_without_a_content_length(client: TestClient) -> None:
    answer = client.post(
        f"{PATH}/with-accumulation",
        content=(b" " * 2**20 for _ in range(40)),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 413


def test_a_request_overrides_its_stored_configuration(client: TestClient) -> None:
    config = client.post(
        "/gradient-accumulation/config",
        json={"accumulation_steps": 4, "target_effective_batch_size": 32, "gradient_clipping": None},
    ).json()
    body = {
        name: value
        for name, value in JOB.items()
        if name not in ("accumulation_steps", "target_effective_batch_size")
    }
    job = client.post(f"{PATH}/with-accumulation", json={**body, "config_id": config["config_id"]}).json()
    assert (job["effective_batch_size"], job["accumulation_steps"]) == (32, 4)
    assert job["config"]["gradient_clipping"] is None
    other = client.post(
        f"{PATH}/with-accumulation", json={**body, "config_id": config["config_id"], "accumulation_steps": 2}
    ).json()
    assert other["accumulation_steps"] == 2
    stats = client.get(f"/gradient-accumulation/stats/{config['config_id']}").json()
    assert {each["training_id"] for each in stats["jobs"]} == {job["id"], other["id"]}


def test_a_configuration_s_devices_count_for_its_jobs(client: TestClient) -> None:
    requested = {"accumulation_steps": 4, "micro_batch_size": 8, "num_gpus": 4}
    config = client.post("/gradient-accumulation/config", json=requested).json()
    body = {"model_name": "accrue/tiny-gpt2", "dataset_config": JOB["dataset_config"]}
    body["config_id"] = config["config_id"]
    job = client.post(f"{PATH}/with-accumulation", json=body).json()
    assert job["effective_batch_size"] == config["effective_batch_size"] == 128
    refused = client.post(f"{PATH}/large-batch", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "target_effective_batch_size")


def test_an_inline_file_is_kept_while_another_job_uses_it(client: TestClient) -> None:
    first = submit(client)
    second = submit(client, dataset_config={"file_id": first["dataset"]["file_id"]})
    for job in (first, second):
        client.post(f"{PATH}/{job['id']}/cancel")
        assert client.delete(f"{PATH}/{job['id']}").status_code == 204
    assert client.get(f"/v1/files/{first['dataset']['file_id']}").status_code == 404


def test_requested_devices_count_for_the_batch_and_a_warning_names_how_many_train(client: TestClient) -> None:
    job = submit(
        client, target_effective_batch_size=None, accumulation_steps=2, micro_batch_size=4, num_gpus=5
    )
    assert job["effective_batch_size"] == 40
    assert [device["gpu_id"] for device in job["plan"]["devices"]] == [0, 1, 2, 3]
    assert job["accumulation_steps"] == 3
    assert any("5 devices were requested" in warning for warning in job["plan"]["warnings"])


def test_the_learning_rate_is_scaled_from_the_base_batch(client: TestClient, database: Any) -> None:
    from app.jobs import transitions

    job = submit(client, base_batch_size=16)
    with database.reading() as session:
        spec = transitions.get(session, job["id"]).spec
    assert spec["optimizer"]["learning_rate"] == pytest.approx(5e-5 * 2)


def test_lists_are_paged_newest_first_and_filtered(client: TestClient) -> None:
    ids = [submit(client, metadata={"n": str(n)}, user_id=n % 2)["id"] for n in range(5)]
    first = client.get(PATH, params={"limit": 2}).json()
    assert [job["id"] for job in first["data"]] == [ids[4], ids[3]]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, ids[4], ids[3])
    rest = client.get(PATH, params={"limit": 100, "after": first["last_id"]}).json()
    assert [job["id"] for job in rest["data"]] == [ids[2], ids[1], ids[0]]
    assert rest["has_more"] is False
    assert [job["id"] for job in client.get(PATH, params={"metadata[n]": "3"}).json()["data"]] == [ids[3]]
    assert len(client.get(PATH, params={"user_id": "1"}).json()["data"]) == 2
    assert client.get(PATH, params={"status": "succeeded"}).json()["data"] == []
    assert client.get(PATH, params={"limit": 1000}).status_code == 422


def test_a_queued_job_can_be_paused_resumed_cancelled_and_deleted(
    client: TestClient, settings: Settings
) -> None:
    job = submit(client, auto_start=False)
    path = f"{PATH}/{job['id']}"
    assert (job["status"], job["waiting"]) == ("paused", None)
    assert client.post(f"{path}/start").json()["status"] == "queued"
    assert client.post(f"{path}/pause").json()["status"] == "paused"
    assert client.post(f"{path}/resume").json()["status"] == "queued"
    assert client.delete(path).status_code == 409
    assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
    refused = client.post(f"{path}/resume")
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")
    assert client.get(f"{path}/model").status_code == 409
    events = client.get(f"{path}/events").json()["data"]
    assert [event["type"] for event in events] == ["cancelled", "queued", "paused", "queued", "submitted"]
    assert client.delete(path).status_code == 204
    assert client.get(path).status_code == 404
    assert nothing_is_left(client, settings)


def test_responses_contain_no_absolute_path_and_no_training_text(
    client: TestClient, settings: Settings
) -> None:
    job = submit(client, dataset_config={"texts": ["the canary sings"]})
    for path in (f"{PATH}/{job['id']}", PATH, f"{PATH}/{job['id']}/events", "/gradient-accumulation/stats"):
        text = client.get(path).text
        assert str(settings.data_dir) not in text
        assert "canary" not in text


def training(**changes: Any) -> dict[str, Any]:
    return {"training_config": {"max_steps": 5, **changes}}


@pytest.mark.parametrize(
    "changes",
    [
        *(training(optimizer=name) for name in ("adamw_8bit", "lion", "lamb", "lars", "sgd", "adafactor")),
        training(optimizer="lars", optimizer_args={"trust_coefficient": 0.01, "nesterov": True}),
        training(lr_scheduler="one_cycle", lr_scheduler_args={"pct_start": 0.2}),
        training(lr_scheduler="cosine", warmup_steps=2, warmup_shape="quadratic"),
        training(method="lora"),
        training(method="qlora"),
        training(method={"lora": {"r": 8, "target_modules": ["c_attn"], "merge": True}}),
        training(label_smoothing=0.1, compile=True, attention="eager"),
        training(report_to=["tensorboard", "wandb", "mlflow"], aux_scope="sequence"),
        {"mixed_precision": "pure_bf16", "accumulate_in_fp32": False},
        {"mixed_precision": "tf32", "accumulate_gradients_on_cpu": True},
        {"accumulation_scheduler": "linear", "accumulation_warmup_steps": 10},
        {"accumulation_scheduler": "noise_scale", "max_effective_batch_size": 512},
        {"accumulation_scheduler": "loss_variance", "loss_variance_threshold": 0.1},
        {"log_micro_losses": True, "log_gradients": True, "profile": True, "loss_spike_zscore": 5},
        {"equivalence_check": False, "noise_scale_every": None},
    ],
    ids=str,
)
def test_every_trainer_option_can_be_requested(client: TestClient, changes: dict[str, Any]) -> None:
    job = submit(client, **changes)
    for name, value in changes.get("training_config", {}).items():
        shown = job["training_config"][name]
        assert shown == value or (isinstance(value, dict) and shown.keys() >= value.keys())
    for name, value in changes.items():
        if name in job["config"]:
            assert job["config"][name] == value
    if changes.get("accumulate_gradients_on_cpu"):
        assert job["accumulation_status"]["accumulate_on_cpu"] is True


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        (training(early_stopping={"patience": 2}), "training_config", "eval_every"),
        (
            training(early_stopping={"patience": 2}, eval_every=1),
            "training_config.early_stopping",
            "validation_split",
        ),
        (training(optimizer="lion", optimizer_args={"eps": 1e-6}), "training_config", "takes betas"),
        (training(optimizer="adafactor", optimizer_args={"eps": 1e-6}), "training_config", "takes none"),
        (
            training(optimizer="sgd", optimizer_args={"nesterov": True}),
            "training_config.optimizer_args",
            "momentum",
        ),
        (training(lr_scheduler="one_cycle", warmup_steps=5), "training_config", "pct_start"),
        (training(lr_scheduler="constant", lr_scheduler_args={"final": 0.1}), "training_config", "final"),
        (training(method={"qlora": {"merge": True}}), "training_config.method", "lora"),
        ({"accumulation_scheduler": "linear"}, None, "accumulation_warmup_steps"),
        ({"accumulation_scheduler": "noise_scale", "max_effective_batch_size": 8}, "max_effective_batch_size",
         "smaller"),
        ({"accumulation_scheduler": "noise_scale", "clip_mode": "each_micro_batch"}, None, "not measured"),
        (
            {"dataset_config": {"texts": ["one"], "validation_split": 0.5}},
            "dataset_config.validation_split",
            "at least two",
        ),
        (
            {"dataset_config": {"texts": ["a", "b"], "validation_file_id": "file-none"}},
            "dataset_config.validation_file_id",
            "No file",
        ),
        (
            {"dataset_config": {"texts": ["a"], "packing": True}, **training(compile=True)},
            "training_config.compile",
            "packing",
        ),
        ({"tune": "first"}, "tune", "leave accumulation_steps"),
        ({"tune": "only", "accumulation_steps": None, "micro_batch_size": 4}, "tune", "micro_batch_size out"),
        ({"tune": "first", "accumulation_steps": None, **training(compile=True)}, "tune", "Leave one"),
        ({"tune": "while_training"}, "tune", "leave accumulation_steps"),
        ({"tune": "while_training", "accumulation_steps": None, "num_gpus": 2}, "tune", "single device"),
        ({"tune": "first", "accumulation_steps": None, "clip_mode": "each_micro_batch"}, "tune", "depend"),
        *(
            ({"tune": tune, "accumulation_steps": None, **training(deterministic=True)}, "tune", "two runs")
            for tune in ("while_training", "first")
        ),
    ],
    ids=str,
)  # fmt: skip
def test_contradictory_fields_are_rejected_with_a_remedy(
    client: TestClient, changes: dict[str, Any], field: str | None, told: str
) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, **changes})
    assert answer.status_code in (404, 422), answer.text
    problem = answer.json()["error"]
    assert told in problem["message"]
    if field is not None:
        assert problem["param"].startswith(field)


@pytest.mark.parametrize(
    ("changes", "tunes"),
    [
        ({}, "while_training"),
        ({"tune": "while_training"}, "while_training"),
        ({"tune": "off"}, None),
        ({"tune": "first"}, "first"),
        ({"micro_batch_size": 2}, None),
        ({"accumulation_steps": 2}, None),
        ({"clip_mode": "each_micro_batch"}, None),
        (training(compile=True), None),
        (training(deterministic=True), None),
        ({"accumulation_scheduler": "noise_scale", "max_effective_batch_size": 64}, None),
        ({"tune": "only", **training(deterministic=True)}, "only"),
    ],
    ids=str,
)
def test_a_job_tunes_while_training_if_that_leaves_its_result_alone(
    client: TestClient, changes: dict[str, Any], tunes: str | None
) -> None:
    job = {**JOB, "accumulation_steps": None, **changes}
    answer = client.post(f"{PATH}/with-accumulation", json=job)
    assert answer.status_code == 202, answer.text
    assert client.get(f"{PATH}/{answer.json()['id']}").json()["tune"] == tunes


def test_a_validation_file_stays_while_a_job_needs_it(client: TestClient) -> None:
    content = b'{"text": "one"}\n{"text": "two"}\n'
    file_id = client.post(
        "/v1/files", files={"file": ("v.jsonl", content)}, data={"purpose": "fine-tune"}
    ).json()["id"]
    data = {"texts": ["a", "b"], "validation_file_id": file_id}
    job = submit(client, dataset_config=data, training_config={"max_steps": 5, "eval_every": 2})
    refused = client.delete(f"/v1/files/{file_id}")
    assert refused.status_code == 409
    assert job["training_id"] in refused.json()["error"]["message"]


def test_validation_lines_are_not_trained_on(client: TestClient) -> None:
    data = {"texts": [f"text {i}" for i in range(100)], "validation_split": 0.2}
    job = submit(client, dataset_config=data, target_effective_batch_size=10, accumulation_steps=None)
    assert job["plan"]["steps_total"] == 3 * 8


def test_datasets_by_name_come_from_the_datasets_folder(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "datasets"
    (folder / "more").mkdir(parents=True)
    (folder / "small.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "more" / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    (tmp_path / "secret.jsonl").write_text('{"text": "secret"}\n')
    (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (folder / "out").symlink_to(tmp_path)
    with_folder = settings.model_copy(update={"datasets_dir": folder})
    with TestClient(create_app(with_folder), base_url="http://127.0.0.1:8000") as client:
        for name, form, examples in (("small", "text", 2), ("more/chat.jsonl", "messages", 1)):
            job = submit(client, dataset_config={"dataset": name})
            assert (job["dataset"]["format"], job["dataset"]["examples"]) == (form, examples)
            stored = settings.files_dir / job["dataset"]["file_id"]
            assert (
                stored.read_text() == next(folder.rglob(f"{name.removesuffix('.jsonl')}.jsonl")).read_text()
            )
        assert submit(client, dataset_config={"dataset": "more"})["dataset"]["examples"] == 1
        for name in ("link", "out/secret", "nothing", "../secret", "out"):
            refused = client.post(
                f"{PATH}/with-accumulation", json={**JOB, "dataset_config": {"dataset": name}}
            )
            assert refused.status_code == 422, name
            assert "secret" not in refused.text.replace(name, "")
        assert "more/chat.jsonl, small.jsonl" in refused.text


def test_an_unchanged_response_gets_304(client: TestClient) -> None:
    path = f"{PATH}/{submit(client)['id']}"
    first = client.get(path)
    tag = first.headers["etag"]
    again = client.get(path, headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    client.post(f"{path}/cancel")
    moved_on = client.get(path, headers={"If-None-Match": tag})
    assert (moved_on.status_code, moved_on.json()["status"]) == (200, "cancelled")


@pytest.mark.parametrize(
    ("fields", "devices"),
    [
        ({"use_multi_gpu": True}, 4),
        ({"use_multi_gpu": False}, 1),
        ({"gpu_ids": [3, 1]}, 2),
        ({"num_gpus": 3, "distributed": "ddp"}, 3),
        ({"num_gpus": 2, "multi_gpu_strategy": {"strategy": "dataparallel"}}, 2),
        ({"num_gpus": 2, "distributed": {"strategy": "fsdp", "cpu_offload": True}}, 2),
        ({"accumulation_steps": [3, 1], "micro_batch_size": 2, "target_effective_batch_size": 8}, 2),
        ({"accumulation_steps": [2, 1, 1], "gpu_ids": [0, 1, 2]}, 3),
        ({"num_gpus": "auto", "target_effective_batch_size": 1}, 1),
        ({"num_gpus": 2, "parallel_independent": True, "sync_gradients": False, "average": True}, 2),
    ],
)
def test_a_job_requests_devices_by_any_of_the_fields(
    client: TestClient, database: Any, fields: dict[str, Any], devices: int
) -> None:
    job = submit(client, **fields)
    assert len(job["plan"]["ranks"]) == devices
    assert sum(rank["share_of_tokens"] for rank in job["plan"]["ranks"]) == pytest.approx(1.0)
    with database.reading() as session:
        from app.jobs import transitions

        stored = transitions.get(session, job["id"])
        assert stored.device_count == devices
        assert stored.gpu_mask == sum(1 << gpu_id for gpu_id in fields.get("gpu_ids", []))


def test_each_device_has_the_accumulation_steps_requested_for_it(client: TestClient) -> None:
    fields = {"accumulation_steps": [3, 1], "micro_batch_size": 2, "target_effective_batch_size": 8}
    plan = submit(client, **fields)["plan"]
    assert [rank["micro_batch_rule"] for rank in plan["ranks"]] == [
        {"rule": "count", "micro_batches": 3},
        {"rule": "count", "micro_batches": 1},
    ]
    assert [rank["share_of_tokens"] for rank in plan["ranks"]] == [0.75, 0.25]


def test_a_job_is_planned_for_a_worker_with_the_required_labels(client: TestClient, database: Any) -> None:
    with database.writing() as session:
        for name, count in (("a", 1), ("b", 3)):
            devices = [vars(device) for device in cpu_devices(count)]
            own = Worker(
                id=f"worker-{name}", hostname=name, devices=devices, running=[], labels={"zone": name}
            )
            live_workers.beat(session, own)
    ranks = {
        zone: len(submit(client, use_multi_gpu=True, requirements={"zone": zone})["plan"]["ranks"])
        for zone in ("a", "b")
    }
    assert ranks == {"a": 1, "b": 3}
    nowhere = submit(client, use_multi_gpu=True, requirements={"zone": "c"})
    assert "no running worker has the labels zone=c" in nowhere["plan"]["warnings"][-1]


def test_a_job_without_a_matching_worker_keeps_the_number_of_devices_requested(
    client: TestClient, database: Any
) -> None:
    with database.writing() as session:
        devices = [vars(device) for device in cpu_devices(2)]
        live_workers.beat(
            session, Worker(id="worker-1", hostname="a", devices=devices, running=[], labels={"zone": "a"})
        )
    for zone, expected in (("a", 2), ("b", 4)):
        job_id = submit(client, num_gpus=4, requirements={"zone": zone})["id"]
        with database.reading() as session:
            assert session.get_one(Job, job_id).device_count == expected


def test_gpus_are_named_on_the_machine_that_is_required(client: TestClient, database: Any) -> None:
    with database.writing() as session:
        for name, count in (("ga", 4), ("gb", 2)):
            devices = [vars(Device(number, "NVIDIA H100", 80 * GIB, "cuda")) for number in range(count)]
            own = Worker(
                id=f"worker-{name}", hostname=name, devices=devices, running=[], labels={"hostname": name}
            )
            live_workers.beat(session, own)
    body = {**JOB, "gpu_ids": [0, 3]}
    ambiguous = client.post(f"{PATH}/with-accumulation", json=body)
    assert (ambiguous.status_code, "hostname" in ambiguous.text) == (422, True)
    answers = {
        name: client.post(
            f"{PATH}/with-accumulation", json={**body, "requirements": {"hostname": name}}
        ).status_code
        for name in ("ga", "gb", "down")
    }
    assert answers == {"ga": 202, "gb": 422, "down": 202}, "a job waits for a worker that is down"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"requirements": {"zone": 5}}, "requirements"),
        ({"requirements": {"a b": "c"}}, "requirements"),
        ({"requirements": {"zone": "a,b"}}, "requirements"),
        ({"requirements": {f"n{i}": "1" for i in range(17)}}, "requirements"),
        ({"executor": "torque"}, "executor"),
    ],
)
def test_other_requirements_and_executors_are_rejected(
    client: TestClient, fields: dict[str, Any], named: str
) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, **fields})
    assert answer.status_code == 422
    assert named in answer.json()["error"]["message"] + str(answer.json()["error"].get("param"))


def test_an_executor_is_a_requirement(client: TestClient) -> None:
    assert submit(client)["requirements"] == {}
    assert submit(client, executor="slurm")["requirements"] == {"executor": "slurm"}
    labels = {"zone": "a", "executor": "local"}
    assert submit(client, executor="local", requirements=labels)["requirements"] == labels
    other = client.post(f"{PATH}/with-accumulation", json={**JOB, "executor": "ray", "requirements": labels})
    assert "requirements.executor differ" in other.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "strategy", "stage", "warning"),
    [
        ({"distributed": "dataparallel"}, "ddp", None, "dataparallel"),
        ({"distributed": "deepspeed"}, "fsdp", 2, "deepspeed"),
        ({"distributed": {"strategy": "deepspeed", "zero_stage": 3}}, "fsdp", 3, "deepspeed"),
        ({"distributed": "deepspeed", "zero_stage": 1}, "fsdp", 1, "deepspeed"),
        ({"multi_gpu_strategy": "fsdp"}, "fsdp", 3, None),
        ({"zero_stage": 2}, "fsdp", 2, None),
        (
            {"zero_stage": 0, "distributed": "deepspeed"},
            "ddp",
            None,
            "zero_stage 0 is treated as ddp",
        ),
        ({"gradient_compression": "bf16"}, "ddp", None, "gradient_compression"),
        ({"distributed": {"gradient_compression": "fp16"}}, "ddp", None, "gradient_compression"),
    ],
)
def test_a_strategy_by_any_of_its_names(
    client: TestClient, fields: dict[str, Any], strategy: str, stage: int | None, warning: str | None
) -> None:
    plan = submit(client, num_gpus=2, **fields)["plan"]
    assert plan["strategy"] == strategy
    assert strategy == "ddp" or plan["zero_stage"] == stage
    named = [each for each in plan["warnings"] if warning is not None and warning in each]
    assert len(named) == (warning is not None), plan["warnings"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"distributed": {"strategy": "fsdp", "gradient_compression": "bf16"}}, "needs strategy ddp"),
        ({"distributed": "fsdp", "gradient_compression": "bf16"}, "needs strategy ddp"),
        ({"zero_stage": 1, "gradient_compression": "bf16"}, "needs strategy ddp"),
        ({"distributed": "ddp", "zero_stage": 2}, "needs strategy fsdp"),
        ({"distributed": "fsdp", "zero_stage": 0}, "needs strategy ddp"),
        ({"distributed": {"zero_stage": 2}, "zero_stage": 2}, "given twice"),
        ({"gradient_compression": "powersgd"}, "powersgd is not available"),
        ({"distributed": {"gradient_compression": "powersgd"}}, "powersgd is not available"),
        ({"zero_stage": 4}, "zero_stage"),
    ],
)
def test_contradictory_strategies_are_rejected_with_the_reason(
    client: TestClient, fields: dict[str, Any], named: str
) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, "num_gpus": 2, **fields})
    assert answer.status_code == 422, answer.text
    assert named in answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"use_multi_gpu": False, "num_gpus": 2},
        {"distributed": "ddp", "multi_gpu_strategy": "ddp"},
        {"distributed": "zero"},
        {"distributed": "fsdp", "num_gpus": 2, "training_config": {"max_steps": 2, "optimizer": "lamb"}},
        {"accumulation_steps": [2, 1], "num_gpus": 3},
        {"parallel_independent": True},
        {"parallel_independent": True, "num_gpus": 100},
        {"parallel_independent": True, "num_gpus": 2, "distributed": "fsdp"},
        {"parallel_independent": True, "num_gpus": 2, "zero_stage": 2},
        {"average": True, "num_gpus": 2},
        {"sync_gradients": False, "num_gpus": 2},
        {"accumulation_steps": [], "num_gpus": 2},
        {"accumulation_steps": [2, 0]},
        {"accumulation_steps": [2, 1], "use_multi_gpu": False},
        {"accumulation_steps": [2, 1], "accumulation_steps_by_device": [2, 1]},
        {"gpu_ids": [63]},
        {"gpu_ids": [0, 0]},
        {"num_gpus": 0},
    ],
)
def test_contradictory_devices_are_rejected(client: TestClient, fields: dict[str, Any]) -> None:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, **fields})
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize(("batch", "is_told"), [(4, True), (8, False)])
def test_more_steps_than_a_batch_has_samples_are_mentioned(
    client: TestClient, batch: int, is_told: bool
) -> None:
    requested = {**JOB, "target_effective_batch_size": batch, "accumulation_steps": 8, "dry_run": True}
    plan = client.post(f"{PATH}/with-accumulation", json=requested).json()["plan"]
    assert any("has only 4 samples" in warning for warning in plan["warnings"]) == is_told
