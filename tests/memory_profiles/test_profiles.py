"""Profiles in the database: requested, stored, found, and compared with measurements."""

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from app import PACKAGES_FOLDER
from app.contract.memory_profile import KINDS, Curve, PointMemory, Profile, Recipe, Stretch
from app.contract.spec import LoraSpec
from app.errors import NotFound
from app.memory_profiles import profiles
from app.memory_profiles.profiles import ProfileKey, key_of
from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from app.planning.devices import GIB
from app.storage.database import Database, database_now
from app.storage.tables import StoredProfile, Worker

LORA = LoraSpec(r=8, alpha=16, dropout=0.0, target_modules=(), merge=False)
CPU = Recipe(device="cpu", precision="fp32")
ARCHITECTURE = from_config(TINY_GPT2)


def wanted(sequence: int = 64, **recipe: Any) -> ProfileKey:
    return ProfileKey("accrue/tiny-gpt2", ARCHITECTURE, TINY_GPT2, CPU.model_copy(update=recipe), sequence)


def profile(per_row: float = GIB) -> Profile:
    one = PointMemory(
        part="forward and backward",
        base=dict.fromkeys(KINDS, 0.0),
        slope={**dict.fromkeys(KINDS, 0.0), "activations": per_row},
    )
    curve = Curve(
        sequence=64,
        stretches=(Stretch(rows=1, once=(one,), accumulating=(one,)),),
        reserved=((4, 1.1),),
        parameters=1,
        trainable=1,
    )
    return Profile(source="simulated", curve=curve, checked_rows=None, check_error=None, seconds=1.0)


def make(database: Database, one: ProfileKey, made: Profile) -> None:
    """Wants a profile, and makes it."""
    with database.writing() as session:
        profiles.request(session, one)
        request = profiles.claim(session, {})
        assert request is not None
        profiles.store(session, request, made)


def test_a_divided_model_has_a_profile_of_its_own(database: Database) -> None:
    """Until it is made, the estimate is the whole model's, divided by formula."""
    divided = CPU.model_copy(update={"parts": 2})
    assert key_of(ARCHITECTURE, CPU, 64) != key_of(ARCHITECTURE, divided, 64)
    make(database, wanted(), profile())
    with database.reading() as session:
        best = profiles.estimates(session, ARCHITECTURE, None)
        assert best(divided, 64).source == "formula"
        assert best(divided, 64).memory(3).activations_bytes == best(CPU, 64).memory(3).activations_bytes
    make(database, wanted(parts=2), profile(per_row=2 * GIB))
    with database.reading() as session:
        best = profiles.estimates(session, ARCHITECTURE, None)
        assert best(divided, 64).source == "simulated"
        assert best(divided, 64).memory(3).activations_bytes == 6 * GIB
        assert best(CPU, 64).memory(3).activations_bytes == 3 * GIB


def test_a_stored_profile_is_found_by_its_inputs(database: Database) -> None:
    make(database, wanted(), profile())
    with database.reading() as session:
        best = profiles.estimates(session, ARCHITECTURE, None)
        assert best(CPU, 64).source == "simulated"
        assert best(CPU, 64).memory(3).activations_bytes == 3 * GIB
        assert best(CPU, 65).source == "formula"
        assert best(CPU.model_copy(update={"gradient_checkpointing": True}), 64).source == "formula"
        assert not profiles.waiting(session)


def test_an_existing_or_requested_profile_is_not_requested_again(database: Database) -> None:
    make(database, wanted(), profile())
    with database.writing() as session:
        profiles.request(session, wanted())
        assert not profiles.waiting(session)
        profiles.request(session, wanted(128))
        profiles.request(session, wanted(128))
        assert profiles.claim(session, {}) is not None
        assert profiles.claim(session, {}) is None


def test_the_newest_request_goes_first(database: Database) -> None:
    for sequence in (16, 32, 48):
        with database.writing() as session:
            profiles.request(session, wanted(sequence))
    with database.writing() as session:
        first = profiles.claim(session, {})
        assert first is not None
        assert first.sequence == 48


def test_without_a_worker_the_request_returns_at_once(database: Database) -> None:
    assert "no worker" in asyncio.run(profiles.wait_for(database, wanted(), 30.0))[0]


def test_a_failed_profile_is_reported_and_not_retried(database: Database) -> None:
    with database.writing() as session:
        now = session.scalar(profiles.select(database_now()))
        session.add(
            Worker(id="worker-1", hostname="h", started_at=now, heartbeat_at=now, devices=[], running=[])
        )
        profiles.request(session, wanted())
        request = profiles.claim(session, {})
        assert request is not None
        profiles.give_up(session, request, "ValueError: no such thing")
    assert "no such thing" in asyncio.run(profiles.wait_for(database, wanted(), 30.0))[0]
    with database.reading() as session:
        assert not profiles.waiting(session)


def test_a_deleted_profile_is_made_again(database: Database) -> None:
    make(database, wanted(), profile())
    with database.writing() as session:
        (stored,) = session.scalars(profiles.select(StoredProfile)).all()
        profiles.remove(session, stored.id)
        with pytest.raises(NotFound):
            profiles.get(session, stored.id)
        profiles.request(session, wanted())
        assert profiles.waiting(session)


def test_a_service_without_torch_has_the_keys_of_its_workers(tmp_path: Path) -> None:
    """Its image and that of the worker are built with the same constraints."""
    constraints = tmp_path / "constraints.txt"
    assert profiles._pinned_version(constraints) == ""
    constraints.write_text("torchao==0.9.0\ntorch==2.13.0\n")
    assert profiles._pinned_version(constraints) == "2.13.0"
    assert profiles._pinned_version(PACKAGES_FOLDER / "constraints.txt") == version("torch").split("+")[0]


@pytest.mark.parametrize(
    ("made", "count"),
    [
        ([({}, 8 * 10**9, 8 * 10**9)], 8 * 10**9),
        ([({"freeze": ("*",)}, 100, 0)], 100),
        ([({"lora": LORA}, 130, 30)], 100),
        ([({"lora": LORA, "freeze": ("*",)}, 130, 20), ({}, 100, 100)], 100),
        ([({"lora": LORA, "freeze": ("*",)}, 130, 20)], None),
        ([({"scores": 3}, 80, 80)], None),
        ([({"scores": 3}, 80, 80), ({"lora": LORA}, 130, 30)], 100),
    ],
)  # fmt: skip
def test_the_exact_count_is_that_of_the_language_model_without_adapters(
    database: Database, made: list[tuple[dict[str, Any], int, int]], count: int | None
) -> None:
    for recipe, parameters, trainable in made:
        curve = profile().curve.model_copy(update={"parameters": parameters, "trainable": trainable})
        make(database, wanted(**recipe), profile().model_copy(update={"curve": curve}))
    estimated = ARCHITECTURE.model_copy(update={"is_estimated": True, "parameters": 77})
    with database.reading() as session:
        found = profiles.with_exact_parameter_count(session, estimated)
    assert (found.parameters, found.is_estimated) == ((77, True) if count is None else (count, False))
