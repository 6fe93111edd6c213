"""Finds, requests and stores memory profiles."""

import hashlib
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from anyio import to_thread
from sqlalchemy import BigInteger, and_, cast, delete, func, select, update

from app import PACKAGES_FOLDER
from app.contract.architecture import Architecture
from app.contract.memory_profile import Profile, Recipe
from app.contract.plan import Plan
from app.contract.spec import Spec
from app.contract.text import storable
from app.devices import live_workers
from app.errors import NotFound
from app.memory_profiles import measurements
from app.memory_profiles.measurements import MeasuredJob
from app.planning.architectures import relevant_fields
from app.planning.devices import Device
from app.planning.estimate import ByFormula, ByMeasurement, ByProfile, BySharding, Estimate, EstimateOf
from app.planning.planner import PlannerEvidence
from app.planning.recipes import recipe_of
from app.planning.throughput import Throughput, ThroughputOf
from app.storage.database import Database, database_now, insert_for
from app.storage.ids import new_id
from app.storage.session import Session
from app.storage.tables import Job, ProfileRequest, StoredProfile
from app.storage.waits import Gone, never, until_found

_PROFILER_VERSION = {"cpu": 3, "cuda": 5}
"""The version of the profiler, by device; profiles made by other versions are not used."""

_CLAIM_SECONDS = 60.0
"""Seconds after which a claimed request that was not answered is given up."""

_LOST = "the simulation took too long, or ended the profiler"

_FREE = and_(ProfileRequest.error.is_(None), ProfileRequest.claimed_at.is_(None))

_FORGOTTEN_AFTER = 24 * 3600.0
"""Seconds after which requests are deleted: no client waits any more, and failed ones may be retried."""

_MOST_REQUESTS = 100
"""The maximum number of requests of one API key; older ones are forgotten."""

_MOST_PROFILES = 10_000
"""The maximum number of stored profiles; older ones are forgotten."""


@dataclass(frozen=True)
class ProfileKey:
    """Everything that a profile depends on."""

    model_name: str
    architecture: Architecture
    config: dict[str, Any]
    recipe: Recipe
    sequence: int

    @property
    def key(self) -> str:
        return key_of(self.architecture, self.recipe, self.sequence)


def key_of(architecture: Architecture, recipe: Recipe, sequence: int) -> str:
    """The key that a profile is stored under: a digest of the architecture, the recipe, the sequence length,
    and the versions of torch and of the profiler."""
    # Recipes did not have these fields at first: left out at their defaults, older keys stay valid.
    defaults = {
        "optimizer_on_cpu": False,
        "parts": 1,
        "zero_stage": 3,
        "direct_sums": False,
        "compile": False,
        "flash_attention": True,
    }
    unused = {name for name, value in defaults.items() if getattr(recipe, name) == value}
    own = recipe.model_dump_json(exclude=unused | {"context_bytes"})
    version: int | str = _PROFILER_VERSION[recipe.device]
    if recipe.freeze or (recipe.lora is not None and recipe.lora.target_modules):
        version = f"{version} by layer"  # earlier profiles took all layers to be alike
    content = f"{architecture.fingerprint} {own} {sequence} {_torch_version()} {version}"
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def exists(session: Session, key: str) -> bool:
    """Whether the profile of that key is known."""
    return session.scalar(select(StoredProfile.id).where(StoredProfile.key == key)) is not None


def estimates(session: Session, architecture: Architecture, device_name: str | None) -> EstimateOf:
    """The best available estimate for each recipe and length: by profile, else by formula.

    Measurements with that recipe and length on such a device, if any, correct the estimate. The estimates are
    read lazily from the session.

    Args:
        device_name: None: the devices are of several kinds.
    """
    error_of = cache(lambda source, device: measurements.mean_error(session, source, device))

    @cache
    def best(recipe: Recipe, sequence: int) -> Estimate:
        key = key_of(architecture, recipe, sequence)
        content = session.scalar(select(StoredProfile.content).where(StoredProfile.key == key))
        profile = None if content is None else Profile.model_validate(content)
        estimate: Estimate
        if profile is None and recipe.parts > 1:
            whole = best(recipe.model_copy(update={"parts": 1}), sequence)
            return BySharding(whole, architecture, recipe, error_of("formula", recipe.device))
        if profile is None:
            estimate = ByFormula(architecture, recipe, sequence, error_of("formula", recipe.device))
        else:
            error = error_of(profile.source, recipe.device)
            estimate = ByProfile(profile.curve, recipe, profile.source, error)
        measured = measurements.points(session, architecture.fingerprint, key, device_name)
        if not measured:
            return estimate
        error = error_of("measured", recipe.device)
        return ByMeasurement(estimate, recipe.device, sequence, tuple(measured), error)

    return best


def throughput(session: Session, architecture: Architecture, device_name: str | None) -> ThroughputOf:
    """The throughput measured with each recipe and length on such a device."""

    def found(recipe: Recipe, sequence: int) -> Throughput | None:
        return measurements.throughput(session, key_of(architecture, recipe, sequence), device_name)

    return found


def known(session: Session, architecture: Architecture, device_name: str | None) -> PlannerEvidence:
    """What is known of an architecture's steps on such devices.

    Args:
        device_name: None: the devices are of several kinds.
    """
    architecture = with_exact_parameter_count(session, architecture)
    on = (session, architecture, device_name)
    return PlannerEvidence(estimates(*on), throughput(*on), architecture)


def with_exact_parameter_count(session: Session, architecture: Architecture) -> Architecture:
    """The architecture with its exact number of parameters, if it was estimated and a worker has built the
    model since then."""
    if not architecture.is_estimated:
        return architecture
    curve, recipe = StoredProfile.content["curve"], StoredProfile.recipe
    profiles = session.execute(
        select(recipe, *(cast(curve[name].as_string(), BigInteger) for name in ("parameters", "trainable")))
        .where(
            StoredProfile.architecture == architecture.fingerprint,
            func.coalesce(recipe["scores"].as_integer(), 0) == 0,  # those with scores have no output head
        )
        .order_by(recipe["lora"].as_string().is_not(None))
        .limit(_PROFILES_WITH_COUNTS)
    )
    counts = (_count_without_adapters(own, *numbers) for own, *numbers in profiles)
    exact = next((count for count in counts if count is not None), None)
    if exact is None:
        return architecture
    return architecture.model_copy(update={"parameters": exact, "is_estimated": False})


_PROFILES_WITH_COUNTS = 20
"""How many profiles of a model are searched for its number of parameters: nearly all have it."""


def _count_without_adapters(recipe: Mapping[str, Any], parameters: int, trainable: int) -> int | None:
    """The parameters of the base model, from a profile's numbers; None if they do not tell."""
    if recipe.get("lora") is None:
        return parameters
    return None if recipe.get("freeze") else parameters - trainable


def measured_job(session: Session, job: Job, spec: Spec, device: Device) -> MeasuredJob:
    """What an attempt of a job measures on a device."""
    architecture, recipe = spec.model.architecture, recipe_of(spec, device)
    sequence = Plan.model_validate(job.plan).sample_length or spec.data.max_length
    return MeasuredJob(
        job=job,
        device=device,
        sequence=sequence,
        architecture=architecture.fingerprint,
        key=key_of(architecture, recipe, sequence),
        estimate=estimates(session, architecture, device.name)(recipe, sequence),
    )


def request(session: Session, wanted: ProfileKey) -> None:
    """Requests a profile, unless it exists, was requested already, or is known to be impossible."""
    if exists(session, wanted.key):
        return
    old = ProfileRequest.created_at < database_now() - _FORGOTTEN_AFTER
    session.execute(delete(ProfileRequest).where(old))
    statement = insert_for(session, ProfileRequest).values(
        key=wanted.key,
        created_at=session.scalar(select(database_now())),
        requested_by=session.viewer.creator,
        model_name=wanted.model_name,
        architecture=wanted.architecture.fingerprint,
        config=relevant_fields(wanted.config),  # which others' requests with this key share
        recipe=wanted.recipe.model_dump(mode="json"),
        sequence=wanted.sequence,
    )
    session.execute(statement.on_conflict_do_nothing(index_elements=["key"]))
    own = select(ProfileRequest.key).where(
        ProfileRequest.requested_by.is_not_distinct_from(session.viewer.creator)
    )
    own = own.where(ProfileRequest.claimed_at.is_(None) | ProfileRequest.error.is_not(None))
    older = own.order_by(ProfileRequest.created_at.desc()).offset(_MOST_REQUESTS)
    session.execute(delete(ProfileRequest).where(ProfileRequest.key.in_(older)))


def request_with_warnings(database: Database, wanted: ProfileKey) -> list[str] | None:
    """Requests a profile if there is none. Returns warnings, as `request_warnings` does."""
    with database.reading() as session:
        if exists(session, wanted.key):
            return []
    with database.writing() as session:
        request(session, wanted)
    with database.reading() as session:
        if not live_workers.any_alive(session):
            return ["memory is estimated by a formula: no worker is running to simulate this model"]
    return request_warnings(database, wanted)


def request_warnings(database: Database, wanted: ProfileKey) -> list[str] | None:
    """Warnings about a profile that was requested; None while it is still being made."""
    with database.reading() as session:
        row, made = session.get(ProfileRequest, wanted.key), exists(session, wanted.key)
    if made:
        return []
    if row is None:
        return [
            "memory is estimated by a formula: the simulation of this step was dropped for newer requests"
        ]
    if row.error is not None:
        return [f"this model cannot be simulated, so memory is estimated by a formula: {row.error}"]
    return None


async def wait_for(database: Database, wanted: ProfileKey, seconds: float, gone: Gone = never) -> list[str]:
    """Requests a profile and waits, without a thread, until it exists, cannot be made, or time runs out.

    Returns at once if there is no worker to make it. Returns warnings for the user.
    """
    warnings = await to_thread.run_sync(request_with_warnings, database, wanted)
    if warnings is None:
        warnings = await until_found(lambda: request_warnings(database, wanted), seconds, gone)
    if warnings is None:
        return ["memory is estimated by a formula while a simulation runs: try again in a few seconds"]
    return warnings


def claim(session: Session, served: dict[str | None, float]) -> ProfileRequest | None:
    """Claims the newest free request of the API key that was served least recently; the clients of older
    requests already got answers by formula.

    A request that was claimed before, and not answered in time, is given up: its simulation may have ended
    the profiler.

    Args:
        served: when each API key was served last; updated here.
    """
    lost = and_(ProfileRequest.error.is_(None), ProfileRequest.claimed_at < database_now() - _CLAIM_SECONDS)
    session.execute(update(ProfileRequest).where(lost).values(error=_LOST))
    by_key = select(ProfileRequest.requested_by, func.max(ProfileRequest.created_at)).where(_FREE)
    waiting = [row.requested_by for row in session.execute(by_key.group_by(ProfileRequest.requested_by))]
    if not waiting:
        return None
    key_id = min(waiting, key=lambda each: served.get(each, 0.0))
    served[key_id] = time.monotonic()
    newest = (
        select(ProfileRequest.key)
        .where(_FREE, ProfileRequest.requested_by.is_not_distinct_from(key_id))
        .order_by(ProfileRequest.created_at.desc())
        .limit(1)
        .scalar_subquery()
    )
    return session.scalars(
        update(ProfileRequest)
        .where(ProfileRequest.key == newest, _FREE)
        .values(claimed_at=database_now())
        .returning(ProfileRequest)
    ).one_or_none()


def waiting(session: Session) -> bool:
    """Whether any requested profile is still to be made and not claimed."""
    return session.scalar(select(ProfileRequest.key).where(_FREE).limit(1)) is not None


def store(session: Session, request: ProfileRequest, profile: Profile) -> None:
    """Keeps a profile that was made for a request."""
    statement = insert_for(session, StoredProfile).values(
        id=new_id("profile"),
        key=request.key,
        created_at=session.scalar(select(database_now())),
        model_name=request.model_name,
        architecture=request.architecture,
        recipe=request.recipe,
        sequence=request.sequence,
        torch_version=_torch_version(),
        content=profile.model_dump(mode="json"),
    )
    session.execute(
        statement.on_conflict_do_update(index_elements=["key"], set_={"content": statement.excluded.content})
    )
    session.execute(delete(ProfileRequest).where(ProfileRequest.key == request.key))
    older = select(StoredProfile.id).order_by(StoredProfile.id.desc()).offset(_MOST_PROFILES)
    session.execute(delete(StoredProfile).where(StoredProfile.id.in_(older)))


def give_up(session: Session, request: ProfileRequest, reason: str) -> None:
    """Notes that a profile cannot be made."""
    session.execute(
        update(ProfileRequest).where(ProfileRequest.key == request.key).values(error=storable(reason)[:500])
    )


def remove(session: Session, profile_id: str) -> None:
    """Deletes a profile; the next request for it makes a new one.

    Raises:
        NotFound: no profile has that id.
    """
    stored = get(session, profile_id)
    session.execute(delete(ProfileRequest).where(ProfileRequest.key == stored.key))
    session.delete(stored)
    session.flush()


def get(session: Session, profile_id: str) -> StoredProfile:
    """Returns a stored profile.

    Raises:
        NotFound: no profile has that id.
    """
    stored = session.get(StoredProfile, profile_id)
    if stored is None:
        raise NotFound(f"No profile has the id {profile_id}.")
    return stored


@cache
def _torch_version() -> str:
    """The installed version of torch, without importing torch. Without torch, as in the image of the service,
    the version that constraints.txt pins, which the image of the worker installs; the empty text if neither
    is there."""
    try:
        return version("torch").split("+")[0]
    except PackageNotFoundError:
        return _pinned_version(PACKAGES_FOLDER / "constraints.txt")


def _pinned_version(constraints: Path) -> str:
    """The version of torch that a file of constraints pins."""
    with suppress(OSError):
        pinned = re.search(r"^torch==([\w.]+)", constraints.read_text(), re.MULTILINE)
        return pinned[1] if pinned else ""
    return ""
