"""Regression tests for the seventh attack: what a trainer or another key could do to others."""

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import OperationalError

from app.contract.regular_files import open_regular
from app.contract.reports import EventLine
from app.jobs import queue, transitions
from app.jobs.transitions import Fence
from app.maintenance.backup import _copy_run
from app.maintenance.retention import delete_expired
from app.results.run_files import tar_of, tar_size
from app.settings import Settings
from app.statistics import totals
from app.storage.database import Database
from app.storage.tables import Delivery, Job, JobEvent, StepMetric
from app.webhooks import deliverer as webhooks
from app.webhooks.deliverer import Deliverer
from app.webhooks.signature import signer
from tests.harness.claims import claim, expire, in_transaction
from tests.harness.ingestion import read, read_once
from tests.harness.log_lines import line
from tests.harness.runs import create_run, until
from tests.harness.submissions import submitted
from workers import ingest as ingestion
from workers.ingest import Position
from workers.orphaned_processes import are_gone, children_of
from workers.reporter import Reporter
from workers.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path / "run")


@pytest.fixture
def fence(database: Database) -> Fence:
    submitted(database)
    fence = claim(database)
    assert fence is not None
    return fence


def steps(database: Database) -> int:
    with database.reading() as session:
        return session.query(StepMetric).count()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", "Infinity"), ("loss", "NaN"), ("samples", str(2**62)), ("tokens", str(2**70)),
        ("input_tokens", "-1"), ("data_seconds", "1e308"), ("step", str(2**31)), ("time", "NaN"),
        ("peak_gb", "-Infinity"), ("micro_losses", "[NaN]"),
    ],
)  # fmt: skip
def test_non_finite_and_huge_numbers_are_not_stored(
    database: Database, run: RunDirectory, fence: Fence, name: str, value: str
) -> None:
    poisoned = json.loads(line(1).model_dump_json())
    raw = json.dumps({**poisoned, name: "HERE"}).replace('"HERE"', value)
    run.metrics.write_text(f"{raw}\n{line(2).model_dump_json()}\n")
    read(database, run, fence)
    assert steps(database) == 1
    with database.writing() as session:
        queue.release(session, fence, "done")
        assert totals.count(session.connection(), None).steps == 1


@pytest.mark.parametrize("value", [2**70, -1, "x", True, None, 1e300, [1], float("inf")])
@pytest.mark.parametrize("kind", ["training", "checkpoint", "skipped"])
def test_event_figures_are_used_only_if_they_are_valid_counts(
    database: Database, run: RunDirectory, fence: Fence, kind: str, value: Any
) -> None:
    data = dict.fromkeys(("steps_total", "step", "skipped"), value)
    event = {"attempt": 1, "time": 1.0, "type": kind, "level": "info", "message": "m", "data": data}
    run.events.write_text(json.dumps(event) + "\n")
    position = read(database, run, fence)
    assert (position.steps_total, position.checkpoint_step, position.skipped) == (None, 0, 0)
    with database.writing() as session:
        queue.release(session, fence, "done")


def test_messages_and_data_of_events_are_cut() -> None:
    event = EventLine(
        attempt=1, time=1.0, type="t", level="info", message="m" * 10**6,
        data={"list": list(range(10**5)), "text": "t" * 10**6, "nan": float("nan")},
    )  # fmt: skip
    assert len(event.message) == 10_000
    assert len(event.data["list"]) == 1000
    assert event.data["nan"] is None
    assert len(json.dumps(event.data)) < 20_000
    wide = EventLine(
        attempt=1, time=1.0, type="t", level="info", message="", data={str(n): "x" * 9000 for n in range(100)}
    )
    assert wide.data == {}


def test_a_job_with_broken_totals_does_not_block_the_recovery_of_others(
    database: Database,
) -> None:
    poisoned, other = submitted(database), submitted(database)
    for _ in range(2):
        assert claim(database) is not None
    with database.writing() as session:
        if database.is_sqlite:
            malformed = text("'{\"loss\": Infinity}'")
            session.execute(update(Job).where(Job.id == poisoned).values(progress=malformed))
        else:
            session.execute(update(Job).where(Job.id == poisoned).values(progress={"skipped": 2**70}))
    for job_id in (poisoned, other):
        expire(database, job_id)
    assert set(in_transaction(database, queue.reclaim_expired)) == {poisoned, other}


def test_a_failed_statement_is_not_treated_as_an_unavailable_database() -> None:
    from app.storage.database import is_unavailable

    def error(code: int) -> OperationalError:
        original = Exception("integer overflow")
        original.sqlite_errorcode = code  # type: ignore[attr-defined]
        return OperationalError("SELECT", None, original)

    assert not is_unavailable(error(1))  # SQLITE_ERROR
    assert is_unavailable(error(5))  # SQLITE_BUSY
    assert is_unavailable(error(6))  # SQLITE_LOCKED


def test_empty_lines_are_skipped_quickly(database: Database, run: RunDirectory, fence: Fence) -> None:
    run.events.write_bytes(b"\n" * 2**22)
    run.metrics.write_bytes(b"\n" * 2**22 + line(1).model_dump_json().encode() + b"\n")
    position, looks = Position(), 0
    while not looks or not position.caught_up:
        position, looks = read_once(database, run, fence, position), looks + 1
    assert steps(database) == 1
    assert looks < 10


def test_invalid_lines_are_read_in_several_short_transactions(
    database: Database, run: RunDirectory, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion, "_SECONDS_AT_ONCE", 0.0)
    run.events.write_bytes(b"x\n" * 40)  # each line in a transaction of its own
    position, looks = Position(), 0
    while not looks or not position.caught_up:
        position, looks = read_once(database, run, fence, position), looks + 1
    assert looks >= 40
    assert position.events == 80


def test_events_beyond_the_maximum_are_not_stored(
    database: Database, run: RunDirectory, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion, "_MAX_EVENT_BYTES", 5000)
    monkeypatch.setattr(ingestion, "_READ_AT_ONCE", 1000)
    with Reporter(run, 1) as reporter:
        for number in range(100):
            reporter.event("note", f"event {number}")
    position = read(database, run, fence)
    assert read(database, run, fence, position) == position
    with database.reading() as session:
        messages = [event.message for event in session.query(JobEvent).filter(JobEvent.line.is_not(None))]
    assert 20 < len(messages) < 70
    assert sum("further ones are not stored" in message for message in messages) == 1


FLIP = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
os.chdir(sys.argv[1])
print("ready", flush=True)
while True:
    libc.renameat2(-100, b"model", -100, b"link", 2)
    libc.renameat2(-100, b"file", -100, b"filelink", 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="exchanges names by renameat2")
def test_a_backup_does_not_follow_links_that_appear_during_the_copy(tmp_path: Path) -> None:
    secret = tmp_path / "elsewhere"
    secret.mkdir()
    (secret / "secret").write_text("secret")
    run = tmp_path / "runs" / "ftjob-1"
    (run / "model").mkdir(parents=True)
    (run / "model" / "weights").write_text("own")
    (run / "file").write_text("own")
    (run / "link").symlink_to(secret)
    (run / "filelink").symlink_to(secret / "secret")
    with subprocess.Popen([sys.executable, "-c", FLIP, str(run)], stdout=subprocess.PIPE) as flipping:
        try:
            assert flipping.stdout is not None
            assert flipping.stdout.readline() == b"ready\n"
            for number in range(100):
                target = tmp_path / f"copy{number}"
                _copy_run(run, target, tmp_path / "links")
                copied = [path for path in target.rglob("*") if path.is_file()]
                assert {path.read_text() for path in copied} <= {"own"}
                assert not any(path.is_symlink() for path in target.rglob("*"))
        finally:
            flipping.kill()


def test_a_copy_has_the_content_and_the_times_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "ftjob-1"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "step-1" / "weights").write_bytes(b"w" * 3_000_000)
    (run / ".unfinished").write_text("x")
    (run / "lock").touch()
    os.utime(run / "checkpoints" / "step-1" / "weights", ns=(10**18, 10**18))
    _copy_run(run, tmp_path / "copy", tmp_path / "links")
    copied = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert [path.name for path in copied] == ["weights"]
    copy = tmp_path / "copy" / "checkpoints" / "step-1" / "weights"
    assert (copy.stat().st_size, copy.stat().st_mtime_ns) == (3_000_000, 10**18)


def test_unresponsive_hosts_of_two_keys_do_not_delay_a_third(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "_LOOKED_AT", 50)
    owned = {owner: submitted(database) for owner in ("alice", "carol", "bob")}
    with database.writing() as session:
        for owner, job_id in owned.items():
            session.execute(update(Job).where(Job.id == job_id).values(owner=owner))
        for owner in ("alice", "carol"):
            for number in range(36):
                url = f"http://h{number}.{owner}.example/"
                session.add(due(f"evt-{owner}{number}", owned[owner], url, float(number)))
    deliverer = Deliverer(database, signer("whsec_" + "A" * 32), private_addresses=True)
    taken = [deliverer._take() for _ in range(6)]
    assert all(each is not None for each in taken)
    with database.writing() as session:
        session.add(due("evt-bob", owned["bob"], "http://good.example/", 2000.0))
    following = deliverer._take()
    assert following is not None
    assert following.id == "evt-bob"


def due(delivery_id: str, job_id: str, url: str, not_before: float) -> Delivery:
    host = url.split("/")[2]
    return Delivery(id=delivery_id, job_id=job_id, created_at=1.0, type="t", url=url, host=host,
                    attempts=0, not_before=not_before)  # fmt: skip


def test_one_job_that_cannot_be_deleted_leaves_the_others_to_retention(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [submitted(database) for _ in range(3)]
    with database.writing() as session:
        session.execute(update(Job).values(status="cancelled", finished_at=1.0))
    from app.maintenance import retention

    honest = retention.delete_job

    def failing(database: Database, settings: Settings, job_id: str) -> None:
        if job_id == ids[1]:
            original = Exception("malformed JSON")
            original.sqlite_errorcode = 1  # type: ignore[attr-defined]
            raise OperationalError("SELECT", None, original) if database.is_sqlite else data_error()
        honest(database, settings, job_id)

    monkeypatch.setattr(retention, "delete_job", failing)
    delete_expired(database, settings, 1.0)
    with database.reading() as session:
        assert [job.id for job in session.query(Job)] == [ids[1]]


def data_error() -> Exception:
    from sqlalchemy.exc import DataError

    return DataError("SELECT", None, Exception("out of range"))


def test_the_tar_size_is_predicted_for_any_file_names(tmp_path: Path) -> None:
    (tmp_path / ("n" * 200)).write_bytes(b"x" * 1000)
    (tmp_path / "short").write_bytes(b"y")
    names = sorted(path.name for path in tmp_path.iterdir())
    files = {name: open_regular(tmp_path, name) for name in names}
    size = tar_size(files, "ftjob-1")
    content = b"".join(tar_of(files, "ftjob-1"))
    assert len(content) == size
    with tarfile.open(fileobj=BytesIO(content)) as tar:
        assert [Path(name).name for name in tar.getnames()] == names


MANY = """
import os, sys, time
from pathlib import Path
from workers.training.processes.process_tree import run_sandboxed

def work(apart):
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    Path(sys.argv[1], "ready").write_text(str(apart))
    time.sleep(600)

sys.exit(run_sandboxed(work, isolated=True))
"""


@pytest.fixture
def process_tree(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", MANY, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfds")
def test_a_killed_trainer_counts_as_ended_only_after_its_children(
    process_tree: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    until(lambda: (tmp_path / "ready").exists(), 30)
    everything = descendants(process_tree.pid)
    assert len(everything) > 200
    inner = children_of(process_tree.pid)
    process_tree.kill()
    process_tree.wait()
    until(lambda: are_gone(inner), 30)
    assert not [pid for pid in everything if alive(pid)]
    for descriptor in inner:
        os.close(descriptor)


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in children for each in (int(child), *descendants(int(child)))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("status", [147, 148, 250, 255])
def test_exit_statuses_above_128_do_not_stop_the_process(tmp_path: Path, status: int) -> None:
    work = f"run_sandboxed(lambda apart: {status}, isolated=True)"
    script = (
        f"import sys; from workers.training.processes.process_tree import run_sandboxed; sys.exit({work})"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60)
    assert done.returncode == status
    assert time.monotonic() - began < 60


def test_a_trainer_s_invalid_events_do_not_break_its_job(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    run.events.write_text(json.dumps({"attempt": 1, "time": 1.0, "type": "skipped", "level": "info",
                                      "message": "m", "data": {"skipped": 2**70}}) + "\n")  # fmt: skip
    read(database, run, fence)
    expire(database, fence.job_id)
    assert in_transaction(database, queue.reclaim_expired) == [fence.job_id]
    with database.reading() as session:
        assert transitions.get(session, fence.job_id).status == "queued"
