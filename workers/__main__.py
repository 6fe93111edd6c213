"""`python -m workers` or `accrue worker`: settings, signals, start."""

import signal

from app.database import Database, migrate
from app.logs import configure
from app.settings import get_settings
from workers.supervisor import Supervisor


def main() -> None:
    """Runs a supervisor until SIGTERM or SIGINT."""
    settings = get_settings()
    configure(settings.log_level, settings.log_format)
    settings.make_directories()
    migrate(settings.url)
    database = Database(settings.url)
    supervisor = Supervisor(settings, database)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.stop)
    supervisor.run()
    database.close()


if __name__ == "__main__":
    main()
