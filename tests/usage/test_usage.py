"""Usage by key and day, and quotas: submissions, claims, reports, on each kind of database."""

import csv
import io
from datetime import UTC, date, datetime
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update

from app.errors import NotFound, QuotaExceeded
from app.jobs import queue
from app.security import keys
from app.settings import Settings
from app.storage.database import Database, database_now
from app.storage.session import Viewer
from app.storage.tables import Attempt, Job, Key, Usage
from app.submissions.key_limits import check_limits
from app.usage import quotas, records
from tests.harness.claims import claim, in_transaction
from tests.harness.requests import PATH, service
from tests.harness.submissions import submitted

HOUR = 3600.0
BODY = {
    "model_name": "accrue/tiny-gpt2",
    "dataset_config": {"texts": ["a", "b"]},
    "target_effective_batch_size": 2,
}


def key(database: Database, name: str = "team", hours: float | None = None) -> str:
    """A key with a quota."""
    with database.writing() as session:
        row, _ = keys.create(session, name, ("read", "write"), None)
        row.device_hours = hours
        return row.id


def of_key(database: Database, owner: str | None, **changes: Any) -> str:
    """A queued job of a key."""
    job_id = submitted(database, **changes)
    with database.writing() as session:
        session.execute(update(Job).where(Job.id == job_id).values(owner=owner))
    return job_id


def run_for(database: Database, owner: str | None, hours: float, **changes: Any) -> None:
    """A job of a key that has run for some time and has succeeded."""
    job_id = of_key(database, owner, **changes)
    fence = claim(database)
    assert fence is not None
    assert fence.job_id == job_id
    with database.writing() as session:
        earlier = database_now() - hours * HOUR
        session.execute(update(Attempt).where(Attempt.job_id == job_id).values(claimed_at=earlier))
        queue.succeed(session, fence, {})


def used(database: Database, owner: str) -> float:
    with database.reading() as session:
        rows = records.between(session, owner, date(2000, 1, 1), date(2100, 1, 1))
    return sum(row.device_seconds for row in rows) / HOUR


def test_attempts_are_added_up_by_key_and_day(database: Database) -> None:
    team, other = key(database), key(database)
    run_for(database, team, 2.0)
    run_for(database, team, 0.5)
    run_for(database, other, 3.0)
    run_for(database, None, 1.0)
    assert used(database, team) == pytest.approx(2.5, abs=0.01)
    assert used(database, other) == pytest.approx(3.0, abs=0.01)
    assert used(database, records.NO_KEY) == pytest.approx(1.0, abs=0.01)
    with database.reading() as session:
        (row,) = session.scalars(select(Usage).where(Usage.owner == team))
        now = session.scalar(select(database_now())) or 0.0
        assert abs(row.day - now / 86400) <= 1
        assert row.attempts == 2


def test_each_attempt_of_a_job_counts_once(database: Database) -> None:
    """Also one that was lost with its worker."""
    team = key(database)
    job_id = of_key(database, team)
    for expected in (1, 2, 3):
        fence = claim(database)
        assert fence is not None
        with database.writing() as session:
            past = database_now() - HOUR
            session.execute(
                update(Attempt)
                .where(Attempt.job_id == job_id, Attempt.attempt == fence.attempt)
                .values(claimed_at=past)
            )
            session.execute(update(Job).where(Job.id == job_id).values(lease_until=database_now() - 1))
            assert queue.reclaim_expired(session) == [job_id]
        assert used(database, team) == pytest.approx(expected, abs=0.01)


def test_a_running_job_counts_the_devices_that_it_has_got(database: Database) -> None:
    """A worker may give a job fewer devices than it has requested."""
    team = key(database, hours=8.0)
    of_key(database, team)
    assert claim(database) is not None
    with database.writing() as session:
        session.execute(update(Job).values(device_count=4))
        earlier = database_now() - 2.5 * HOUR
        session.execute(update(Attempt).values(claimed_at=earlier, plan={"ranks": [{}]}))
    assert_used_up(database)
    with database.reading() as session:
        assert records.running_seconds(session, [team])[team] == pytest.approx(2.5 * HOUR, abs=60)


def test_usage_outlives_the_job(database: Database) -> None:
    team = key(database)
    run_for(database, team, 1.0)
    with database.writing() as session:
        session.delete(session.scalars(select(Job)).one())
    assert used(database, team) == pytest.approx(1.0, abs=0.01)


def test_a_key_that_has_used_up_its_quota_waits(database: Database) -> None:
    """Its queued jobs too, while those of others are claimed; running ones go on."""
    team, other = key(database, hours=2.0), key(database)
    run_for(database, team, 1.5)
    running = of_key(database, team)
    fence = claim(database)
    assert fence is not None
    assert fence.job_id == running
    waiting, others = of_key(database, team), of_key(database, other)
    with database.writing() as session:
        earlier = database_now() - HOUR
        session.execute(update(Attempt).where(Attempt.job_id == running).values(claimed_at=earlier))
    found = claim(database)
    assert found is not None
    assert found.job_id == others, "the older job's key has used 2.5 of 2 hours"
    assert claim(database) is None
    assert_used_up(database, team)
    with database.writing() as session:
        queue.renew_lease(session, fence, 15.0)
        queue.succeed(session, fence, {})
    in_transaction(database, quotas.set_quota, team, 3.0)
    found = claim(database)
    assert found is not None
    assert found.job_id == waiting


@pytest.mark.parametrize(("hours", "refused"), [(1.0, True), (0.0, True), (1.2, False), (None, False)])
def test_submissions_are_refused_once_the_quota_is_used_up(
    database: Database, settings: Settings, hours: float | None, refused: bool
) -> None:
    team = key(database, hours=hours)
    run_for_free(database, team)
    assert_used_up(database, *[team] * refused)
    viewer = Viewer(owner=team, creator=team)
    with database.seen_by(viewer).writing() as session:
        if not refused:
            check_limits(session, settings)
            return
        with pytest.raises(QuotaExceeded, match=r"submit again from 20\d\d-\d\d-01"):
            check_limits(session, settings)


def assert_used_up(database: Database, *keys: str) -> None:
    """Claims and pages agree on the keys that have used up their quotas."""
    with database.reading() as session:
        assert quotas.used_up(session) == keys
        assert tuple(each.key_id for each in quotas.all_quotas(session) if each.is_used_up) == keys


def run_for_free(database: Database, team: str) -> None:
    """An hour of use, whatever the quota."""
    with database.writing() as session:
        day = records.number_of(datetime.now(UTC).date())
        session.add(Usage(owner=team, day=day, device_seconds=1.1 * HOUR, attempts=1))


def test_usage_of_other_months_does_not_count(database: Database) -> None:
    team = key(database, hours=1.0)
    first, following = records.month_of(datetime.now(UTC).timestamp())
    with database.writing() as session:
        for day in (records.number_of(first) - 1, records.number_of(following)):
            session.add(Usage(owner=team, day=day, device_seconds=99 * HOUR, attempts=1))
    with database.reading() as session:
        (quota,) = quotas.all_quotas(session)
        assert (quota.used_hours, quota.renews) == (0.0, following)
        assert quotas.used_up(session) == ()


@pytest.mark.parametrize(
    ("day", "first", "following"),
    [
        (datetime(2026, 12, 31, 23, 59, tzinfo=UTC), date(2026, 12, 1), date(2027, 1, 1)),
        (datetime(2028, 2, 29, tzinfo=UTC), date(2028, 2, 1), date(2028, 3, 1)),
    ],
)
def test_months_end_in_utc(day: datetime, first: date, following: date) -> None:
    assert records.month_of(day.timestamp()) == (first, following)


def test_an_unknown_key_has_no_quota(database: Database) -> None:
    with database.writing() as session, pytest.raises(NotFound, match="accrue keys list"):
        quotas.set_quota(session, "key-none", 1.0)


@pytest.mark.sqlite
def test_over_http(settings: Settings) -> None:
    with service(settings) as (client, header):
        database = client.app.state.database  # type: ignore[attr-defined]
        with database.writing() as session:
            own = session.scalars(select(Key)).one()
            own.name, own.device_hours = "=team", 1.0
            team = own.id
        stranger = key(database, "other")
        admin = admin_header(database)
        run_for_free(database, team)
        run_for_free(database, stranger)
        answer = client.post(f"{PATH}/with-accumulation", json=BODY, headers=header)
        assert answer.status_code == 429
        assert "of its 1 device hours this month" in answer.json()["detail"]
        report = client.get("/gradient-accumulation/usage", headers=header).json()
        assert [each["key_id"] for each in report["data"]] == [team]
        assert report["device_hours"] == pytest.approx(1.1)
        (quota,) = report["quotas"]
        assert (quota["device_hours"], quota["used_device_hours"]) == (1.0, pytest.approx(1.1))
        whole = client.get("/gradient-accumulation/usage", headers=admin).json()
        assert {each["key_id"] for each in whole["data"]} == {team, stranger}
        table = client.get("/gradient-accumulation/usage?format=csv", headers=admin)
        assert table.headers["content-type"].startswith("text/csv")
        rows = {row["key_id"]: row for row in csv.DictReader(io.StringIO(table.text))}
        assert rows[team]["key_name"] == "'=team", "no formula for a spreadsheet"
        assert float(rows[stranger]["device_hours"]) == pytest.approx(1.1)
        metrics = client.get("/metrics", headers=admin).text
        assert f'accrue_device_seconds_total{{key="{team}"}} 3960.0' in metrics
        for wrong in ("first=2026-02-01&last=2026-01-01", "first=2020-01-01&last=2026-01-01", "first=x"):
            assert client.get(f"/gradient-accumulation/usage?{wrong}", headers=header).status_code == 422


def admin_header(database: Database) -> dict[str, str]:
    with database.writing() as session:
        _, made = keys.create(session, "admin", ("admin",), None)
    return {"Authorization": f"Bearer {made}"}


def test_a_waiting_job_says_that_the_quota_is_used_up(database: Database, client: TestClient) -> None:
    del client
    from app.jobs.waiting import WaitingReasons
    from app.storage.tables import Worker

    team = key(database, hours=1.0)
    run_for_free(database, team)
    with database.writing() as session:
        devices = [{"id": "cpu", "name": "CPU", "memory_bytes": 1, "kind": "cpu"}]
        session.add(
            Worker(
                id="worker-1", hostname="a", started_at=0.0, heartbeat_at=database_now(), devices=devices,
                running=[], labels={},
            )
        )  # fmt: skip
    job_id = of_key(database, team)
    with database.reading() as session:
        waiting = WaitingReasons(session).of(session.get_one(Job, job_id))
        assert waiting is not None
        assert waiting.reason == "quota_used_up"
    with database.connecting() as connection:
        found = WaitingReasons(connection)
        assert not connection.in_transaction()
        with database.reading() as session:
            own = found.of(session.get_one(Job, job_id))
        assert own is not None
        assert own.reason == "quota_used_up"
        assert not connection.in_transaction(), "a connection that is kept open would see nothing new"


def test_nothing_is_counted_twice_if_a_transaction_fails(database: Database) -> None:
    team = key(database)
    of_key(database, team)
    fence = claim(database)
    assert fence is not None

    def ends_and_fails() -> None:
        with database.writing() as session:
            queue.succeed(session, fence, {})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        ends_and_fails()
    with database.writing() as session:
        assert session.scalar(select(func.count()).select_from(Usage)) == 0
        queue.succeed(session, fence, {})
        assert session.scalar(select(func.sum(Usage.attempts))) == 1


def test_an_attempt_of_a_lost_worker_ends_with_its_lease(database: Database) -> None:
    """However late the loss is noticed: the trainer cannot have run for longer."""
    team = key(database, hours=8.0)
    job_id = of_key(database, team)
    fence = claim(database)
    assert fence is not None
    with database.writing() as session:
        session.execute(update(Attempt).values(claimed_at=database_now() - 60 * HOUR))
        session.execute(update(Job).values(lease_until=database_now() - 59 * HOUR))
    with database.reading() as session:  # before any worker takes the job back
        assert records.running_seconds(session, [team])[team] == pytest.approx(HOUR, abs=60)
        assert quotas.used_up(session) == ()
    with database.writing() as session:
        assert queue.reclaim_expired(session) == [job_id]
    assert used(database, team) == pytest.approx(1.0, abs=0.01)
    following = claim(database)
    assert following is not None
    with database.reading() as session:
        assert queue.seconds_run(session, following) == pytest.approx(HOUR, abs=60)


def test_a_clock_that_was_set_back_gives_no_negative_usage(database: Database) -> None:
    team = key(database)
    of_key(database, team)
    fence = claim(database)
    assert fence is not None
    with database.writing() as session:
        session.execute(update(Attempt).values(claimed_at=database_now() + HOUR))
        assert records.running_seconds(session, [team])[team] == 0.0
        queue.succeed(session, fence, {})
    assert used(database, team) == 0.0
