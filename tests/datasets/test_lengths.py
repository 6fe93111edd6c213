"""Lengths of samples: measured by the profiler, kept, and used by plans."""

import asyncio
import json

import pytest
from sqlalchemy import select, update

from app.contract.preview import Lengths, PreviewSpec
from app.contract.spec import Overlength, Spec
from app.datasets import content, files, lengths, previews
from app.planning.plan import sample_length_of
from app.settings import Settings
from app.storage.database import Database, database_now
from app.storage.tables import File, PreviewRequest, StoredLengths, Worker
from tests.harness.specs import make_spec
from workers.profiling import previews as profiler

LINES = [*("a" * (number % 7 + 3) for number in range(1500)), "b" * 100, "a"]


@pytest.fixture
def spec(database: Database, settings: Settings) -> Spec:
    settings.make_directories()
    path = settings.files_dir / "file-1"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    checked = content.check(path, settings, field="file")
    with database.writing() as session:
        files.add(session, path, checked, filename="f.jsonl", purpose="fine-tune")
        now = session.scalar(select(database_now()))
        session.add(
            Worker(id="worker-1", hostname="h", started_at=now, heartbeat_at=now, devices=[], running=[])
        )
    spec = make_spec()
    data = spec.data.model_copy(
        update={"sha256": checked.sha256, "examples": len(LINES), "max_length": 512, "overlength": "truncate"}
    )
    return spec.model_copy(update={"data": data})


@pytest.fixture
def order(spec: Spec) -> PreviewSpec:
    order = lengths.measurement_request(spec)
    assert order is not None
    return order


def test_lengths_are_measured_once_and_kept(
    database: Database, settings: Settings, spec: Spec, order: PreviewSpec
) -> None:
    for is_new in (True, False):
        with database.writing() as session:
            assert lengths.find(session, order) is None
            assert lengths.request(session, order) is is_new
    assert profiler.answer_one(database, settings)
    assert not profiler.answer_one(database, settings)
    asyncio.run(lengths.wait_for(database, order, 5.0))
    with database.writing() as session:
        found = lengths.find(session, order)
        assert session.scalars(select(PreviewRequest)).all() == []
        assert found is not None
        assert found.examples < len(LINES)
        assert found.longest == 101, "the longest line, and the end of a text"
        assert found.kept == pytest.approx(7, abs=0.2)
        assert sample_length_of(spec, found) == 128
        session.delete(session.get_one(File, "file-1"))
    with database.reading() as session:
        assert session.scalars(select(StoredLengths)).all() == []


def test_a_preview_s_lengths_are_kept_too(database: Database, settings: Settings, order: PreviewSpec) -> None:
    shown = order.model_copy(update={"shown": 2})
    with database.writing() as session:
        order_of_preview = shown.model_dump(mode="json")
        session.add(PreviewRequest(id="preview-1", created_at=1.0, file_id="file-1", order=order_of_preview))
    assert profiler.answer_one(database, settings)
    with database.reading() as session:
        assert session.get_one(PreviewRequest, "preview-1").answer is not None
        found = lengths.find(session, order)
        assert found is not None
        assert found.longest == 101


def test_a_measurement_that_failed_is_not_repeated(
    database: Database, settings: Settings, order: PreviewSpec
) -> None:
    bad = order.model_copy(update={"data": order.data.model_copy(update={"format": "messages"})})
    with database.writing() as session:
        assert lengths.request(session, bad)
    assert profiler.answer_one(database, settings)
    with database.writing() as session:
        assert not lengths.request(session, bad)
    asyncio.run(lengths.wait_for(database, bad, 5.0))


def test_one_owner_has_few_open_requests(database: Database, order: PreviewSpec) -> None:
    def with_length(number: int) -> PreviewSpec:
        return order.model_copy(update={"data": order.data.model_copy(update={"max_length": number})})

    with database.writing() as session:
        assert [lengths.request(session, with_length(number)) for number in range(100, 106)] == [
            *[True] * 4, False, False,
        ]  # fmt: skip
        session.execute(update(PreviewRequest).values(created_at=1.0))
        assert lengths.request(session, with_length(200)), "older ones are forgotten"
        assert len(session.scalars(select(PreviewRequest)).all()) == 1


def test_previews_are_made_before_lengths_of_any_owner(database: Database, order: PreviewSpec) -> None:
    with database.writing() as session:
        assert lengths.request(session, order)
        session.flush()
        preview = order.model_copy(update={"shown": 1}).model_dump(mode="json")
        session.add(PreviewRequest(id="preview-1", created_at=1.0, file_id="file-1", order=preview))
        other = File(
            id="file-2", created_at=0.0, filename="f", purpose="fine-tune", bytes=1, sha256="0",
            format="text", examples=1, inline=True, owner="other",
        )  # fmt: skip
        session.add(other)
        session.flush()
        session.add(PreviewRequest(id="preview-2", created_at=2.0, file_id="file-2", order=preview))
    served: dict[str | None, float] = {"other": 9e9}
    claimed = []
    for _ in range(3):
        with database.writing() as session:
            request = previews.claim(session, served)
            assert request is not None
            claimed.append(request.id)
    assert claimed[:2] == ["preview-1", "preview-2"]


def test_a_request_whose_profiler_was_killed_is_taken_up_again(
    database: Database, order: PreviewSpec
) -> None:
    with database.writing() as session:
        assert lengths.request(session, order)
        assert previews.claim(session, {}) is not None
        assert previews.claim(session, {}) is None
        session.execute(update(PreviewRequest).values(claimed_at=database_now() - 60))
        assert previews.has_unclaimed(session)
        assert previews.claim(session, {}) is not None


def test_a_regular_file_is_not_sampled_regularly(
    database: Database, settings: Settings, order: PreviewSpec
) -> None:
    lines = [json.dumps({"text": "a" * (700 if number % 2 else 3)}) for number in range(1400)]
    (settings.files_dir / "file-1").write_text("".join(f"{line}\n" for line in lines))
    data = order.data.model_copy(update={"examples": len(lines), "max_length": 1000})
    order = order.model_copy(update={"data": data})
    with database.writing() as session:
        assert lengths.request(session, order)
    assert profiler.answer_one(database, settings)
    with database.reading() as session:
        found = lengths.find(session, order)
    assert found is not None
    assert found.mean == pytest.approx(352, rel=0.15)


def test_without_a_worker_nothing_is_requested(database: Database, order: PreviewSpec) -> None:
    with database.writing() as session:
        session.delete(session.get_one(Worker, "worker-1"))
        session.flush()
        assert not lengths.request(session, order)
        assert not previews.has_unclaimed(session)


@pytest.mark.parametrize(
    ("examples", "longest", "expected"),
    [(None, 0, 1000), (1502, 20, 64), (1502, 64, 64), (1502, 65, 128), (900, 64, 128), (1502, 5000, 1000)],
)
def test_the_longest_sample_is_rounded_up(
    spec: Spec, examples: int | None, longest: int, expected: int
) -> None:
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"max_length": 1000})})
    found = None
    if examples is not None:
        found = Lengths(
            examples=examples, shortest=1, median=1, mean=1, longest=longest, over_max_length=0,
            without_targets=0, target_share=1.0, histogram=(),
        )  # fmt: skip
    assert sample_length_of(spec, found) == expected


def test_packed_rows_are_as_long_as_max_length(spec: Spec) -> None:
    packed = spec.model_copy(update={"data": spec.data.model_copy(update={"packing": True})})
    assert lengths.measurement_request(packed) is None
    assert lengths.measurement_request(spec.model_copy(update={"compile": True})) is None


@pytest.mark.parametrize(
    ("overlength", "longest", "over", "without", "warning"),
    [
        ("truncate", 1000, 0, 5, None),
        ("split", 5000, 3, 0, None),
        ("truncate", 1001, 0, 0, "1 of 50 measured samples is longer than max_length 1000 (the longest has "
         "1,001 tokens) and will be cut off there"),
        ("truncate", 5000, 3, 2, "3 of 50 measured samples are longer than max_length 1000 (the longest has "
         "5,000 tokens) and will be cut off there, and in 2 of the measured samples, nothing is left that "
         "counts toward the loss"),
        ("error", 5000, 3, 0, "3 of 50 measured samples are longer than max_length 1000 (the longest has "
         "5,000 tokens), so the job will end with the error overlength: raise max_length, or set another "
         "overlength"),
    ],
)  # fmt: skip
def test_a_warning_says_how_many_samples_are_too_long(
    spec: Spec, overlength: Overlength, longest: int, over: int, without: int, warning: str | None
) -> None:
    data = spec.data.model_copy(update={"max_length": 1000, "overlength": overlength})
    measured = Lengths(
        examples=50, shortest=1, median=1, mean=1, longest=longest, over_max_length=over,
        without_targets=without, target_share=1.0, histogram=(),
    )  # fmt: skip
    assert lengths.warning_of_lengths(data, measured) == warning
