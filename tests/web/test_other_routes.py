import gzip
import math
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app.settings import Settings
from app.storage.tables import Job, Worker
from app.web import static_files, validation_errors
from tests.harness.requests import JOB, PATH, service

ROOT = "/gradient-accumulation"


def test_health_and_readiness(client: TestClient) -> None:
    assert client.get("/healthz").json()["status"] == "ok"
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["workers"]) == (200, 0)
    assert "accrue worker" in ready.json()["note"]


def test_a_configuration_is_stored_listed_and_deleted(client: TestClient) -> None:
    body = {"accumulation_steps": 4, "target_effective_batch_size": 32, "mixed_precision": True,
            "gradient_clipping": 1.0}  # fmt: skip
    answer = client.post(f"{ROOT}/config", json=body)
    assert answer.status_code == 201
    config = answer.json()
    assert config["config_id"].startswith("accumulation_")
    assert config["effective_batch_size"] == 32
    assert config["config"]["clip_mode"] == "after_accumulation"
    assert client.get(f"{ROOT}/config/{config['config_id']}").json() == config
    assert [each["config_id"] for each in client.get(f"{ROOT}/config").json()["data"]] == [
        config["config_id"]
    ]
    assert client.get(f"{ROOT}/stats/{config['config_id']}").json()["status"] == "unused"
    assert client.delete(f"{ROOT}/config/{config['config_id']}").status_code == 204
    assert client.get(f"{ROOT}/config/{config['config_id']}").status_code == 404


def test_a_job_s_configuration_can_be_read_by_the_job_s_id(client: TestClient) -> None:
    body = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"texts": ["a"]}, "accumulation_steps": 2}
    job = client.post(f"{ROOT}/training/with-accumulation", json=body).json()
    config = client.get(f"{ROOT}/config/{job['id']}").json()
    assert (config["effective_batch_size"], config["config"]["accumulation_steps"]) == (16, 2)


def test_conflicting_numbers_are_refused_with_the_right_one(client: TestClient) -> None:
    body = {"accumulation_steps": 3, "target_effective_batch_size": 30, "micro_batch_size": 8}
    answer = client.post(f"{ROOT}/config", json=body)
    assert answer.status_code == 422
    assert "takes 4 accumulation steps, not 3" in answer.json()["detail"]


def test_statistics_of_an_empty_service_and_of_a_waiting_job(client: TestClient) -> None:
    totals = client.get(f"{ROOT}/stats").json()
    assert (totals["jobs"], totals["steps"], totals["by_status"]) == (0, 0, {})
    body = {"model_name": "accrue/tiny-gpt2", "dataset_config": {"texts": ["a"]}, "user_id": 7}
    job = client.post(f"{ROOT}/training/with-accumulation", json=body).json()
    totals = client.get(f"{ROOT}/stats").json()
    assert (totals["by_status"], totals["by_user"]) == ({"queued": 1}, {"7": 1})
    stats = client.get(f"{ROOT}/stats/{job['id']}").json()
    assert (stats["status"], stats["stats"]["steps"], stats["stats"]["loss_mean"]) == ("queued", 0, None)
    metrics = client.get(f"{ROOT}/training/{job['id']}/metrics").json()
    assert metrics == {"training_id": job["id"], "steps": 0, "data": [], "evaluations": []}
    assert client.get(f"{ROOT}/training/{job['id']}/log").text == ""


@pytest.mark.parametrize("identifier", ["ftjob-x", "accumulation_x"])
def test_statistics_of_unknown_ids_are_404(client: TestClient, identifier: str) -> None:
    assert client.get(f"{ROOT}/stats/{identifier}").status_code == 404


@pytest.mark.parametrize(
    "path", ["training/x", "training/x/log", "training/x/metrics", "training/x/model", "config/x"]
)
def test_unknown_objects_get_404_with_the_standard_error_body(client: TestClient, path: str) -> None:
    answer = client.get(f"{ROOT}/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_performance(client: TestClient) -> None:
    body = client.get(f"{ROOT}/performance/metrics").json()
    assert body["jobs"] == []
    assert body["api_latency"]["requests"] >= 0
    query = "model_size=large&target_batch_size=64"
    recommended = client.get(f"{ROOT}/performance/recommendations?{query}").json()
    assert recommended["effective_batch_size"]["value"] == 64
    assert recommended["parameters"] == 760_000_000
    assert recommended["learning_rate"]["evidence"] == "literature"
    four = client.get(f"{ROOT}/performance/recommendations?{query}&num_gpus=4").json()
    for answer, samples in ((recommended, 64), (four, 16)):  # on each device
        micro, steps = (answer[name]["value"] for name in ("micro_batch_size", "accumulation_steps"))
        assert steps == math.ceil(samples / micro)
    by_name = client.get(f"{ROOT}/performance/recommendations?model_name=gpt2").json()
    assert by_name["effective_batch_size"]["range"] == [32.0, 64.0]
    assert client.get(f"{ROOT}/performance/recommendations?model_size=huge").status_code == 422
    assert client.get(f"{ROOT}/performance/recommendations?training_id=ftjob-x").status_code == 404


def test_devices_and_workers(client: TestClient) -> None:
    gpus = client.get(f"{ROOT}/gpus").json()
    assert [gpu["gpu_id"] for gpu in gpus["declared"]] == [0, 1, 2, 3]
    assert client.get(f"{ROOT}/workers").json()["data"] == []


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("PUT", "/healthz", 405)])
def test_framework_errors_have_the_standard_error_body(
    client: TestClient, method: str, path: str, status: int
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert {"type", "title", "status", "detail", "instance", "error"} <= answer.json().keys()


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"origin": "https://evil.example"},
        {"host": "[::1"},
        {"origin": "http://["},
    ],
)
def test_pages_of_other_sites_cannot_send_requests(client: TestClient, headers: dict[str, str]) -> None:
    answer = client.get("/healthz", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"


def test_the_service_s_own_pages_can_send_requests(client: TestClient) -> None:
    for own in ({"origin": "http://127.0.0.1:8000"}, {"sec-fetch-site": "same-origin"},
                {"sec-fetch-site": "none"}):  # fmt: skip
        assert client.get("/healthz", headers=own).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
    ids=str,
)
def test_pages_of_another_site_or_port_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get("/gradient-accumulation/training", headers=headers).status_code == 403


def test_a_link_from_another_site_may_open_the_dashboard(client: TestClient) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200


def test_repeated_origin_headers_are_rejected(client: TestClient) -> None:
    twice = [("host", "127.0.0.1:8000"), ("host", "evil.example")]
    assert client.get("/gradient-accumulation/training", headers=twice).status_code == 403


def test_internal_errors_give_500_without_a_stack_trace(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.statistics import totals

    def broken(session: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(totals, "count", broken)
    answer = client.get(f"{ROOT}/stats", headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "mine"


def test_the_document_describes_every_route(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert "/gradient-accumulation/training/with-accumulation" in document["paths"]
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["summary"]


def test_large_responses_are_compressed_if_the_client_accepts_it(client: TestClient) -> None:
    for path, encoding in (("/openapi.json", "gzip"), ("/healthz", None)):
        answer = client.get(path, headers={"Accept-Encoding": "gzip"})
        assert answer.headers.get("content-encoding") == encoding
    assert (
        "content-encoding" not in client.get("/openapi.json", headers={"Accept-Encoding": "identity"}).headers
    )


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{ROOT}/training?limt=5", 422),
        (f"{ROOT}/training?=5", 422),
        (f"{ROOT}/gpus?verbose=1", 422),
        ("/v1/fine_tuning/jobs?order=asc", 400),
        (f"{ROOT}/training?limit=5&metadata[team]=a", 200),
        ("/v1/fine_tuning/jobs?limit=5&metadata[team]=a", 200),
    ],
)
def test_unknown_query_parameters_are_rejected_by_name(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    if status != 200:
        name = path.partition("?")[2].partition("=")[0]
        assert f"Unknown query parameter {name!r}" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{ROOT}/training?limit=5&limit=6", 422),
        (f"{ROOT}/training?metadata[team]=a&metadata[team]=b", 422),
        ("/v1/fine_tuning/jobs?after=ftjob-1&after=ftjob-1", 400),
        (f"{ROOT}/calculate-batch-size?model_name=accrue/tiny-gpt2&gpus=24GB&gpus=24GB", 200),
    ],
)
def test_repeated_query_parameters_are_rejected_unless_they_are_lists(
    client: TestClient, path: str, status: int
) -> None:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert "is given twice" in answer.json()["detail"]


def test_a_flag_is_true_or_false(client: TestClient) -> None:
    for given in (0, 1, "true", "no"):
        answer = client.post(f"{ROOT}/config", json={"accumulate_gradients_on_cpu": given})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (
            422,
            "accumulate_gradients_on_cpu",
        )


def test_contents_that_need_no_key_are_compressed_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed: list[int] = []
    honest = gzip.compress

    def counted(content: bytes, *args: Any, **options: Any) -> bytes:
        compressed.append(len(content))
        return honest(content, *args, **options)

    monkeypatch.setattr(static_files.gzip, "compress", counted)
    static_files._compressed.cache_clear()
    for path in ("/openapi.json", "/docs/static/swagger-ui-bundle.js", "/dashboard/plotly.js"):
        compressed.clear()
        for _ in range(3):
            answer = client.get(path, headers={"Accept-Encoding": "gzip"})
            assert (answer.status_code, answer.headers["content-encoding"]) == (200, "gzip")
            assert answer.headers["vary"] == "Accept-Encoding"
        assert len(compressed) == 1, path
        plain = client.get(path, headers={"Accept-Encoding": "identity"})
        assert plain.content == answer.content


def test_many_unknown_fields_are_looked_up_only_as_far_as_they_are_reported(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[str] = []
    honest = validation_errors._unknown

    def counted(field: str, requested: Any) -> str:
        looked_up.append(field)
        return honest(field, requested)

    monkeypatch.setattr(validation_errors, "_unknown", counted)
    body = {"model_name": "gpt2", **{f"target_effective_batch_siz_{number}": 1 for number in range(400)}}
    answer = client.post(f"{ROOT}/calculate-batch-size", json=body)
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) == validation_errors.MAX_REPORTED
    assert len(looked_up) == validation_errors.MAX_REPORTED


def test_integers_with_hundreds_of_digits_are_rejected_in_uploads_too(client: TestClient) -> None:
    for digits, status in ((600, 200), (700, 400)):
        content = f'{{"text": "a", "note": {"7" * digits}}}\n'
        answer = client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "fine-tune"})
        assert answer.status_code == status, answer.text
    assert "Line 1" in answer.text or "line 1" in answer.text


def test_a_worker_s_jobs_are_those_that_it_holds_now(settings: Settings) -> None:
    """The list that a worker reported last may name jobs that have ended, or that another one has."""
    with service(settings) as (client, mine):
        ids = [
            client.post(f"{PATH}/with-accumulation", json=JOB, headers=mine).json()["id"] for _ in range(3)
        ]
        stale, newer = "worker-1", "worker-2"
        with client.app.state.database.writing() as session:  # type: ignore[attr-defined]
            for name in (stale, newer):
                at = {"started_at": 0.0, "heartbeat_at": 0.0}
                session.add(Worker(id=name, hostname=name, devices=[], running=ids, labels={}, **at))
            other = {"status": "running", "worker_id": newer}
            session.execute(update(Job).where(Job.id == ids[0]).values(**other))
            session.execute(update(Job).where(Job.id == ids[1]).values(owner="key-other", **other))
        listed = client.get(f"{ROOT}/workers", headers=mine).json()["data"]
        running = {each["id"]: each["running"] for each in listed}
        assert running.pop(stale) == []
        assert sorted(running.pop(newer)) == ["another key's job", ids[0]]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files",
        "/v1/fine_tuning/jobs",
        "/v1/fine_tuning/jobs/ftjob-1/events",
        "/v1/fine_tuning/jobs/ftjob-1/checkpoints",
        f"{ROOT}/training",
        f"{ROOT}/training/ftjob-1/events",
        f"{ROOT}/config",
        f"{ROOT}/profiles",
        f"{ROOT}/audit",
    ],
)
@pytest.mark.parametrize("after", ["", "nonsense", "worker-00062b"])
def test_a_page_begins_only_after_an_id_of_its_list(client: TestClient, path: str, after: str) -> None:
    """Compared as text, anything else gave an empty page or the first one again."""
    answer = client.get(path, params={"after": after})
    assert answer.status_code == (400 if path.startswith("/v1") else 422)
    assert "after: is not an id in this list: give the last_id of the page before" in answer.json()["detail"]
