"""The temperature limit: a job whose GPU is too hot pauses until it is cooler, or continues elsewhere."""

import time
from enum import Enum, auto

import structlog

from app.planning.devices import Device
from workers.leases import Running
from workers.slots import Slots

log = structlog.get_logger("accrue.worker")

MAX_COOLING_SECONDS = 600.0
"""A GPU that is still too hot after this many seconds without work is set aside, and its job continues on
other devices."""

COOLER_BY = 5.0
"""Training continues once every GPU is at least this many degrees Celsius below the limit; without this
margin, it would pause after each window."""


class CoolingState(Enum):
    """How hot a job's GPUs are."""

    BELOW_LIMIT = auto()
    """Training goes on."""
    COOLING_DOWN = auto()
    """Training pauses between two windows."""
    STAYS_HOT = auto()
    """Pausing did not help: the job must leave its devices, of which the hot one was set aside."""


def enforce(running: Running, slots: Slots, limit: float | None) -> CoolingState:
    """Pauses a job while one of its GPUs is too hot; it keeps its devices.

    Args:
        limit: in degrees Celsius; None means that there is no limit.
    """
    if limit is None:
        return CoolingState.BELOW_LIMIT
    is_paused, now = running.cooling_since is not None, time.monotonic()
    hot = _hotter_than(limit - COOLER_BY if is_paused else limit, running, slots)
    if hot is None:
        if is_paused:
            running.cooling_since = None
            running.run.end_cooling_down()
        return CoolingState.BELOW_LIMIT
    if running.cooling_since is None:
        running.cooling_since = now
        why = f"its GPU {hot.name} is hotter than {limit:g} °C (ACCRUE_MAX_GPU_TEMPERATURE)"
        running.run.request_cooling_down(why)
        log.warning("training pauses", job=running.fence.job_id, why=why)
    running.last_sign_at = now  # a job that pauses is not stuck
    if now <= running.cooling_since + MAX_COOLING_SECONDS:
        return CoolingState.COOLING_DOWN
    slots.set_aside(hot, f"it is still hotter than {limit - COOLER_BY:g} °C")
    return CoolingState.STAYS_HOT


def _hotter_than(celsius: float, running: Running, slots: Slots) -> Device | None:
    """The first of a job's GPUs above a temperature; one whose temperature is unknown counts as cool."""
    for device in running.devices:
        own = slots.temperature(device)
        if own is not None and own > celsius:
            return device
    return None
