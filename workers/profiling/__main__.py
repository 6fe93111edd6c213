"""`python -m workers.profiling`: answers requests for profiles and previews, until it is stopped."""

import os
import signal
import time
from types import FrameType

import structlog
import torch
from sqlalchemy.exc import OperationalError

from app.contract.memory_profile import Recipe
from app.logs import configure
from app.memory_profiles import profiles
from app.planning.catalogue import TINY_GPT2
from app.settings import get_settings
from app.storage.database import ChangeDetector, Database
from workers.profiling import previews
from workers.profiling.profile import make_profile
from workers.profiling.profile import profiles as simulated
from workers.profiling.side_by_side import run_in_forks
from workers.training.lifeline import end_with_supervisor

log = structlog.get_logger("accrue.profiler")

_POLL_SECONDS = 0.05
_RETRY_SECONDS = 5.0
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
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    for device in ("cuda", "cpu"):  # warm up: import and compile what the first profile needs
        previews.answer_one(database, settings)  # answer what was requested during the imports
        make_profile(TINY_GPT2, Recipe(device=device, precision="bf16"), 128)
    log.info("profiler ready")
    changes = ChangeDetector(database)
    while not stopped:
        try:
            if not changes.any() or not (previews.answer_one(database, settings) or answer_one(database)):
                time.sleep(_POLL_SECONDS)
        except OperationalError as error:
            log.warning("the database did not answer", error=str(error.orig))
            time.sleep(_RETRY_SECONDS)
    database.close()


def answer_one(database: Database) -> bool:
    """Makes the newest requested profile. Returns False if there is no request."""
    with database.reading() as session:
        if not profiles.waiting(session):
            return False
    with database.writing() as session:
        request = profiles.claim(session)
    if request is None:
        return False
    try:
        recipe = Recipe.model_validate(request.recipe)
        for profile in simulated(request.config, recipe, request.sequence, run_in_forks):
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
            profiles.give_up(session, request, _error_line(error))
    return True


def _error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


if __name__ == "__main__":
    main()
