"""The inputs of planning: what is known of a job's memory and speed, read at most once a second.

The plan of a submission is a prediction; the worker plans again with what is known at that time.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from app.contract.architecture import Architecture
from app.contract.memory_profile import Recipe
from app.contract.preview import Lengths, PreviewSpec
from app.contract.spec import RunPrecision, Spec
from app.datasets import lengths
from app.devices import live_workers
from app.memory_profiles import measurements, profiles
from app.memory_profiles.profiles import ProfileKey
from app.planning.devices import Device
from app.planning.estimate import Estimate, EstimateOf
from app.planning.planner import PlannerEvidence
from app.planning.throughput import Throughput, ThroughputOf
from app.statistics import performance, work_done
from app.statistics.performance import Speed
from app.statistics.work_done import DeviceHistory
from app.storage.database import Database

KEPT_SECONDS = 1.0
_MOST_KEPT = 1000

Value = TypeVar("Value")

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class ShortCache:
    """A cache whose values expire after a short time; threads may share it."""

    def __init__(self, seconds: float = KEPT_SECONDS) -> None:
        self._seconds = seconds
        self._values: dict[Hashable, tuple[float, Any]] = {}

    def get(self, key: Hashable, look_up: Callable[[], Value]) -> Value:
        """The cached value of a key if it is recent; otherwise a new one."""
        until, value = self._values.get(key, (0.0, None))
        if time.monotonic() < until:
            kept: Value = value
            return kept
        found = look_up()
        if len(self._values) >= _MOST_KEPT:
            self._values.clear()
        self._values[key] = time.monotonic() + self._seconds, found
        return found


class PlanningInputs:
    """The inputs of planning that one caller may see.

    Args:
        database: limited to the rows that the caller may see.
        kept: the cache, shared by all callers.
    """

    def __init__(self, database: Database, kept: ShortCache) -> None:
        self.database = database
        self._kept = kept

    def fresh(self) -> "PlanningInputs":
        """The same inputs, read again instead of taken from the cache."""
        return PlanningInputs(self.database, ShortCache())

    def gpus(self, requirements: Mapping[str, str] = _NO_LABELS) -> list[Device]:
        """See `live_workers.gpus`."""
        key = ("gpus", tuple(sorted(requirements.items())))
        return self._found(key, live_workers.gpus, live_workers.SILENT_SECONDS, requirements)

    def machines_with_gpus(self, requirements: Mapping[str, str]) -> int:
        """See `live_workers.machines_with_gpus`."""
        key = ("machines", tuple(sorted(requirements.items())))
        return self._found(key, live_workers.machines_with_gpus, requirements)

    def devices_by_worker(self, requirements: Mapping[str, str]) -> list[list[Device]]:
        """See `live_workers.devices_by_worker`."""
        key = ("devices", tuple(sorted(requirements.items())))
        return self._found(key, live_workers.devices_by_worker, requirements)

    def margin(self, device: Literal["cpu", "cuda"]) -> float | None:
        """See `measurements.margin`."""
        return self._found(("margin", device), measurements.margin, device)

    def speed(self, spec: Spec, device: Device) -> Speed | None:
        """See `performance.speed`; from the jobs that the caller sees."""
        return self._found(
            ("speed", self.database.viewer.owner, spec, device), performance.speed, spec, device
        )

    def work_done(self, device: Device, precision: RunPrecision) -> DeviceHistory:
        """See `work_done.work_done`."""
        return self._found(("work", device, precision), work_done.work_done, device, precision)

    def tokens_per_sample(self, spec: Spec) -> float | None:
        """See `work_done.tokens_per_sample`; from the jobs that the caller sees."""
        file_id, vocabulary = spec.data.file_id, spec.model.architecture.vocabulary
        key = ("lengths", self.database.viewer.owner, file_id, vocabulary, spec.data.max_length)
        return self._found(key, work_done.tokens_per_sample, file_id, vocabulary, spec.data.max_length)

    def lengths(self, order: PreviewSpec) -> Lengths | None:
        """See `lengths.find`."""
        return self._found(("measured lengths", order), lengths.find, order)

    def request_lengths(self, order: PreviewSpec) -> bool:
        """See `lengths.request`."""

        def requested() -> bool:
            with self.database.writing() as session:
                return lengths.request(session, order)

        return self._kept.get(("wanted lengths", order), requested)

    def known(self, architecture: Architecture, device_name: str | None) -> PlannerEvidence:
        """See `profiles.known`."""
        if architecture.is_estimated:
            architecture = self._found(
                ("exact count", architecture), profiles.with_exact_parameter_count, architecture
            )
        on = (architecture, device_name)
        return PlannerEvidence(self._estimates(*on), self._throughput(*on), architecture)

    def _estimates(self, architecture: Architecture, device_name: str | None) -> EstimateOf:

        def best(recipe: Recipe, sequence: int) -> Estimate:
            key = ("estimate", profiles.key_of(architecture, recipe, sequence), device_name)
            return self._found(
                key,
                lambda session: profiles.estimates(session, architecture, device_name)(recipe, sequence),
            )

        return best

    def _throughput(self, architecture: Architecture, device_name: str | None) -> ThroughputOf:

        def found(recipe: Recipe, sequence: int) -> Throughput | None:
            key = ("throughput", profiles.key_of(architecture, recipe, sequence), device_name)
            return self._found(
                key, lambda session: profiles.throughput(session, architecture, device_name)(recipe, sequence)
            )

        return found

    def plan(
        self, spec: Spec, sample_length: int, devices: Sequence[Device], make: Callable[[], Value]
    ) -> Value:
        """The cached or new result of `make` for a spec on devices, per caller."""
        key = ("plan", self.database.viewer.owner, spec, sample_length, tuple(devices))
        return self._kept.get(key, make)

    def request_profile(self, wanted: ProfileKey) -> None:
        """Requests a profile that does not exist yet, without waiting for it."""
        self._kept.get(("wanted", wanted.key), lambda: profiles.request_with_warnings(self.database, wanted))

    def _found(self, key: Hashable, look_up: Callable[..., Value], *arguments: object) -> Value:
        def in_a_session() -> Value:
            with self.database.reading() as session:
                return look_up(session, *arguments)

        return self._kept.get(key, in_a_session)
