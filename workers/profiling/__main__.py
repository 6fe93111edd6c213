"""`python -m workers.profiling`: answers requests for profiles and previews, until it is stopped."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import structlog
import torch
from sqlalchemy.exc import OperationalError

from app.contract.memory_profile import Profile, Recipe
from app.logs import configure
from app.memory_profiles import profiles
from app.planning.catalogue import TINY_GPT2
from app.settings import Settings, get_settings
from app.storage.database import ChangeDetector, Database
from workers.profiling import previews
from workers.profiling.parallel_forks import run_in_forks
from workers.profiling.profile import make_profile
from workers.profiling.profile import profiles as simulated
from workers.stop_signals import StopSignals
from workers.training.models.loading_errors import reason_of
from workers.training.processes.lifeline import end_with_supervisor
from workers.training.processes.limits import limited_memory

log = structlog.get_logger("accrue.profiler")

_served: dict[str | None, float] = {}
"""When each key was served last."""
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 5.0
_SIMULATION_SECONDS = 50.0
"""The time limit of a simulation; shorter than the time after which its request is given up."""
_SIMULATION_BYTES = 2 * 2**30
"""The memory that a simulation may take, beyond what the profiler has mapped already."""
_NICENESS = 5
"""Trainers on the same machine have priority."""


def main() -> None:
    """Runs until SIGTERM, or until the supervisor that started it has gone."""
    end_with_supervisor()
    settings = get_settings()
    configure(settings.log_level, settings.log_format)
    database = Database(settings.resolved_database_url)
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    stop = StopSignals()
    for device in ("cuda", "cpu"):  # warm up: import and compile what the first profile needs
        with suppress(OperationalError):  # the loop below reports it
            previews.answer_one(database, settings)  # what was requested during the imports
        make_profile(TINY_GPT2, Recipe(device=device, precision="bf16"), 128)
    log.info("profiler ready")
    changes = ChangeDetector(database)
    while not stop.received:
        try:
            if not changes.any() or not _answer_next(database, settings):
                time.sleep(_POLL_SECONDS)
        except OperationalError as error:
            log.warning("the database did not answer", error=str(error.orig))
            time.sleep(_RETRY_SECONDS)
    database.close()


def _answer_next(database: Database, settings: Settings) -> bool:
    """Answers the next request of each kind, so that many of one kind do not delay the other. Returns False
    if there is none."""
    previewed, profiled = previews.answer_one(database, settings), answer_one(database)
    return previewed or profiled


def answer_one(database: Database) -> bool:
    """Makes one requested profile: the newest of the key that was served least recently.

    Returns False if there is no request.
    """
    with database.reading() as session:
        if not profiles.waiting(session):
            return False
    with database.writing() as session:
        request = profiles.claim(session, _served)
    if request is None:
        return False
    try:
        recipe = Recipe.model_validate(request.recipe)
        simulations = simulated(request.config, recipe, request.sequence, run_in_forks)
        until = time.monotonic() + _SIMULATION_SECONDS
        while (profile := _next_within_limits(simulations, until)) is not None:
            with database.writing() as session:
                profiles.store(session, request, profile)
                if profiles.waiting(session):
                    break  # another request is waiting: leave this profile unchecked
            log.info("profile made", model=request.model_name, seconds=round(profile.seconds, 2))
    except OperationalError:
        raise
    except Exception as error:  # any config.json may arrive, and cause any error
        log.exception("could not make the profile", model=request.model_name)
        with database.writing() as session:
            profiles.give_up(session, request, reason_of(error, request.config))
    return True


def _next_within_limits(simulations: Iterator[Profile], until: float) -> Profile | None:
    """The next profile, made within a limit of memory and time; None if there is no other one.

    Args:
        until: when time is out, on the monotonic clock.

    Raises:
        MemoryError: it took too much memory.
        TimeoutError: it took too long.
    """
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, until - time.monotonic()))
    try:
        with limited_memory(_SIMULATION_BYTES):
            return next(simulations, None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the simulation took longer than {_SIMULATION_SECONDS:.0f} s")


if __name__ == "__main__":
    main()
