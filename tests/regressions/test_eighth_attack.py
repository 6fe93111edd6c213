"""Regression tests for the eighth attack: what a trainer could do to others, and two plain mistakes."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import update

from app.contract.preview import Lengths
from app.contract.regular_files import NotRegular, read_regular
from app.contract.reports import Completions, Operators, Tuning
from app.errors import TooManyRequests
from app.jobs import transitions
from app.jobs.transitions import Fence
from app.maintenance.backup import _copy_run
from app.memory_profiles import measurements
from app.memory_profiles.measurements import MeasuredJob
from app.planning.devices import GIB, Device
from app.settings import Settings
from app.statistics import counters
from app.storage.database import Database
from app.storage.tables import Job, JobEvent, Measurement
from app.web import downloads
from app.web.downloads import Downloads
from tests.harness.claims import claim
from tests.harness.ingestion import read, read_once
from tests.harness.log_lines import line
from tests.harness.runs import create_run
from tests.harness.submissions import submitted
from workers import ingest as ingestion
from workers.ingest import Position
from workers.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path / "run")


@pytest.fixture
def fence(database: Database) -> Fence:
    submitted(database)
    fence = claim(database)
    assert fence is not None
    return fence


def test_a_file_that_is_larger_than_its_kind_is_not_read(tmp_path: Path, run: RunDirectory) -> None:
    (tmp_path / "large").write_bytes(b"x" * 1001)
    with pytest.raises(NotRegular):
        read_regular(tmp_path, "large", max_bytes=1000)
    assert read_regular(tmp_path, "large", max_bytes=1001) == b"x" * 1001
    (run.path / "failure.json").write_text('{"code": "c", "message": "m", "permanent": true}' + " " * 2**16)
    assert run.failure() is None


@pytest.mark.parametrize("kind", [Operators, Completions])
def test_an_invalid_list_is_rejected_with_little_memory(kind: type[Operators | Completions]) -> None:
    content = '{"data": [' + ",".join(["[]"] * 500_000) + "]}"
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError):
            kind.model_validate_json(content)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def measured_job(database: Database, job_id: str) -> MeasuredJob:
    memory = SimpleNamespace(peak_process_bytes=GIB, peak_allocated_bytes=GIB)
    estimate = SimpleNamespace(source="formula", memory=lambda rows, *, accumulating: memory)
    with database.reading() as session:
        job = transitions.get(session, job_id)
    device = Device("cpu", "CPU", 24 * GIB, "cpu")
    return MeasuredJob(job, device, 32, "architecture", "key", estimate)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "peak", "is_kept"),
    [(64, GIB, True), (64, 2 * GIB, True), (64, 2**50, False), (64, 25 * GIB, False), (64, 6 * GIB, False),
     (64, GIB // 4, False), (0, GIB, False), (2**31 - 1, GIB, False), (64, 0, False)],
)  # fmt: skip
def test_implausible_measurements_do_not_affect_plans(
    database: Database, tokens: int, peak: int, is_kept: bool
) -> None:
    job_id = submitted(database)
    tried = {"token_budget": 64, "micro_batches": 2, "largest_tokens": tokens, "samples_per_second": 1.0,
             "tokens_per_second": 1.0, "peak_bytes": peak}  # fmt: skip
    tuning = Tuning.model_validate({"token_budget": 64, "samples": 8, "tried": [tried]})
    with database.writing() as session:
        measurements.record_tuning(session, measured_job(database, job_id), tuning)
    with database.reading() as session:
        assert session.query(Measurement).count() == int(is_kept)


def test_a_backup_whose_disk_is_full_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "ftjob-1"
    (run / "model").mkdir(parents=True)
    (run / "model" / "weights").write_text("w")

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.maintenance.backup.os.utime", full)
    with pytest.raises(OSError, match="No space"):
        _copy_run(run, tmp_path / "copy", tmp_path / "links")


def test_a_copy_of_a_sparse_file_takes_no_more_space(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "ftjob-1"
    run.mkdir(parents=True)
    with (run / "sparse").open("wb") as file:
        file.seek(2**30)
        file.write(b"end")
        file.truncate(2**31)
    _copy_run(run, tmp_path / "copy", tmp_path / "links")
    copy = (tmp_path / "copy" / "sparse").stat()
    assert copy.st_size == 2**31
    assert copy.st_blocks * 512 < 2**22
    with (tmp_path / "copy" / "sparse").open("rb") as file:
        file.seek(2**30 - 1)
        assert file.read(5) == b"\0end\0"


def test_empty_lines_between_others_are_found_without_copies(
    database: Database, run: RunDirectory, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    honest = ingestion._log_lines

    def counted(raw: list[bytes]) -> list[Any]:
        looked_at.append(sum(map(len, raw)))
        return honest(raw)

    monkeypatch.setattr(ingestion, "_log_lines", counted)
    piece = b"x" * (2**18) + b"\n" + b"\n \n" * 2499
    run.metrics.write_bytes(piece * 8 + line(1).model_dump_json().encode() + b"\n")
    position, looks = Position(), 0
    while not looks or not position.caught_up:
        position, looks = read_once(database, run, fence, position), looks + 1
    assert max(looked_at) < 2**19  # a long line is looked at by itself
    with database.reading() as session:
        assert transitions.get(session, fence.job_id).progress["step"] == 1


def test_a_line_that_is_too_long_is_an_error_of_its_job(
    database: Database, run: RunDirectory, fence: Fence
) -> None:
    run.metrics.write_bytes(b"x" * 2**22)
    with pytest.raises(ValueError, match="longer than"):
        read(database, run, fence, Position())


def test_invalid_progress_is_ignored(database: Database, run: RunDirectory, fence: Fence) -> None:
    (run.path / "progress.json").write_text('{"attempt": "x"}')
    assert read(database, run, fence, Position()).window is None


@pytest.mark.parametrize("data", [{}, {"step": 1}, {"step": [1], "loss": 1.0}, {"step": "x", "loss": None},
                                  {"step": 1, "loss": "low"}])  # fmt: skip
def test_an_incomplete_evaluation_event_is_not_stored(
    database: Database, run: RunDirectory, fence: Fence, data: dict[str, Any]
) -> None:
    event = {"attempt": 1, "time": 1.0, "type": "evaluation", "level": "info", "message": "m", "data": data}
    run.events.write_text(json.dumps(event) + "\n")
    read(database, run, fence, Position())
    with database.reading() as session:
        assert session.query(JobEvent).filter(JobEvent.type == "evaluation").count() == 0


def test_lengths_of_a_preview_are_numbers() -> None:
    fields = {"examples": 1, "shortest": 1, "median": 1.0, "mean": float("nan"), "longest": 1,
              "over_max_length": 0, "without_targets": 0, "target_share": 1.0, "histogram": ()}  # fmt: skip
    with pytest.raises(ValidationError, match="finite"):
        Lengths.model_validate(fields)


def test_more_than_two_billion_trained_tokens_are_counted(database: Database) -> None:
    job_id = submitted(database)
    with database.writing() as session:
        done = {"status": "succeeded", "result": {"trained_tokens": 2**40}}
        session.execute(update(Job).where(Job.id == job_id).values(**done))
    with database.reading() as session:
        assert counters.count(session)["trained_tokens", ""] == 2**40


def test_open_files_of_downloads_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "MAX_OPEN_FILES", 10)
    streams, closed = Downloads(), []
    first = streams.stream("alice", iter(()), files=8)
    with pytest.raises(TooManyRequests, match="files open"):
        streams.stream("bob", iter(()), lambda: closed.append("bob"), files=3)
    assert closed == ["bob"]
    first._close()
    streams.stream("bob", iter(()), files=3)


def test_a_model_s_other_files_are_not_opened(settings: Settings) -> None:
    from app.results import run_files

    folder = settings.runs_dir / "ftjob-1" / "model"
    folder.mkdir(parents=True)
    for number in range(300):
        (folder / f"other{number}").touch()
    (folder / "config.json").write_text("{}")
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = run_files.model_files(settings, "ftjob-1", ["config.json"])
    assert files is not None
    assert list(files) == ["config.json"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    run_files.close(files)
