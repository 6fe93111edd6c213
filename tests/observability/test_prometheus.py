"""What Prometheus scrapes, read by its own parser."""

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families as parse

from app.jobs import lifecycle, queue
from app.jobs.events import record_event
from app.jobs.transitions import Fence
from app.storage.database import Database
from app.storage.tables import Job
from tests.harness.requests import JOB, PATH, key_for


def scraped(client: TestClient, **header: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in parse(client.get("/metrics", headers=header).text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_metrics_cover_the_queue_and_http_responses(client: TestClient) -> None:
    jobs = [client.post(f"{PATH}/with-accumulation", json=JOB).json()["id"] for _ in range(3)]
    client.post(f"{PATH}/{jobs[0]}/cancel")
    client.get(f"{PATH}/{jobs[0]}")
    client.get("/nowhere/at/all")
    found = scraped(client)
    assert found["accrue_jobs"][("queued",)] == 2
    assert found["accrue_jobs"][("cancelled",)] == 1
    assert found["accrue_jobs"][("running",)] == 0
    assert found["accrue_queue_jobs"] == {
        ("no_worker",): 2, ("no_matching_worker",): 0, ("no_free_gpu",): 0, ("retry_delay",): 0,
        ("starting",): 0, ("quota_used_up",): 0,
    }  # fmt: skip
    assert 0 <= found["accrue_queue_oldest_seconds"][()] < 60
    assert found["accrue_workers_alive"][()] == 0
    counted = found["accrue_http_request_seconds_count"]
    assert counted[("POST", "/training/with-accumulation", "202")] == 3
    assert counted[("GET", "/training/{training_id}", "200")] == 1
    assert counted[("GET", "none", "404")] == 1


def test_metrics_require_the_admin_scope(client: TestClient) -> None:
    database: Database = client.app.state.database  # type: ignore[attr-defined]
    assert client.get("/metrics", headers=key_for(database)).status_code == 403
    assert "accrue_jobs" in scraped(client, **key_for(database, "admin"))


def test_counters_do_not_decrease_when_jobs_are_deleted(client: TestClient) -> None:
    database: Database = client.app.state.database  # type: ignore[attr-defined]
    job_id = client.post(f"{PATH}/with-accumulation", json=JOB).json()["id"]
    fence = Fence(job_id, 1, "worker-1")
    with database.writing() as session:
        assert queue.claim(session, "worker-1", 60.0) == fence
        record_event(session, session.get_one(Job, job_id), "out_of_memory", "smaller micro-batches")
        queue.succeed(session, fence, {"files": [], "trained_tokens": 700})
    names = ("accrue_job_seconds_total", "accrue_trained_tokens_total", "accrue_oom_recoveries_total")
    before = {name: scraped(client)[name] for name in names}
    assert before["accrue_trained_tokens_total"] == {(): 700.0}
    assert before["accrue_oom_recoveries_total"] == {(): 1.0}
    with database.writing() as session:
        lifecycle.remove(session, job_id)
    assert {name: scraped(client)[name] for name in names} == before
