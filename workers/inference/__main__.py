"""`python -m workers.inference`: answers requests, until it is stopped or there is nothing to do."""

import os
import time

import structlog
from sqlalchemy.exc import OperationalError

from app.errors import ReplacedDatabase
from app.jobs import queue
from app.logs import configure
from app.settings import get_settings
from app.storage.database import Database
from app.storage.ids import new_id
from workers.device_locks import DeviceLocks
from workers.inference.dispatcher import Dispatcher
from workers.inference.placement import Placement
from workers.slots import Slots, labels_of
from workers.stop_signals import StopSignals
from workers.training.processes.lifeline import end_with_supervisor

log = structlog.get_logger("accrue.inference")

_RETRY_SECONDS = 2.0
_NICENESS = 5
"""Of this process and its engines: trainers on the same machine have priority."""


def main() -> None:
    """Runs until SIGTERM, until the supervisor that started it has gone, or until it is idle."""
    end_with_supervisor()
    settings = get_settings()
    configure(settings.log_level, settings.log_format)
    database = Database(settings.resolved_database_url)
    os.nice(_NICENESS)
    stop = StopSignals()
    slots = Slots(cpu_devices=settings.cpu_devices)

    def training_waits() -> bool:
        with database.reading() as session:
            return queue.any_queued(session, {**labels_of(slots.available()), **settings.labels})

    placement = Placement(settings, DeviceLocks(settings), slots, training_waits)
    dispatcher = Dispatcher(settings, database, placement, new_id("inference"))
    log.info("inference process ready")
    try:
        while not (stop.received or dispatcher.is_idle):
            try:
                dispatcher.turn()
            except OperationalError as error:
                log.warning("the database did not answer", error=str(error.orig))
                time.sleep(_RETRY_SECONDS)
            except ReplacedDatabase as error:
                log.error("nothing can be stored", error=error.message)
                time.sleep(_RETRY_SECONDS)
    finally:
        dispatcher.close()
        database.close()


if __name__ == "__main__":
    main()
