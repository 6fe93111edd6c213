"""`python -m workers` or `accrue worker`: settings, signals, start."""

import os
import signal

import structlog

from app.logs import configure
from app.maintenance.data_folder import held_by_worker
from app.maintenance.ineffective_settings import ineffective_settings
from app.runtime.parent import end_with_parent
from app.settings import get_settings
from app.storage.database import Database
from app.storage.migrations import migrate
from workers.executors.choose import executor_of
from workers.executors.slots import ExecutorSlots
from workers.slots import Slots
from workers.spot_notices import SpotNotices
from workers.supervisor import Supervisor
from workers.trainer_process import check_network_isolation


def main(*, until_empty: bool = False) -> None:
    """Runs a supervisor until SIGTERM or SIGINT.

    Args:
        until_empty: whether to end as soon as no job is queued or running.
    """
    end_with_parent()
    settings = get_settings()
    configure(settings.log_level, settings.log_format)
    for message in ineffective_settings():
        structlog.get_logger().warning(message)
    if settings.offline and not os.environ.get("HF_HUB_OFFLINE"):
        os.environ["HF_HUB_OFFLINE"] = "1"  # for huggingface_hub, in all processes of the worker
    if not settings.trainer_network:
        check_network_isolation()
    settings.make_directories()
    with held_by_worker(settings):
        migrate(settings.resolved_database_url)
        database = Database(settings.resolved_database_url, idle_seconds=settings.lease_seconds)
        executor = executor_of(settings)
        slots = Slots(cpu_devices=settings.cpu_devices) if executor is None else ExecutorSlots(executor)
        supervisor = Supervisor(settings, database, slots, executor, until_empty=until_empty)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, supervisor.stop)
        signal.signal(signal.SIGUSR1, supervisor.drain)
        if settings.spot_notices:
            SpotNotices(settings.spot_notices, supervisor.stop).start()
        supervisor.run()
        database.close()


if __name__ == "__main__":
    main()
