"""Fixtures with real processes: a service, its workers and their trainers, called over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.postgresql import Server
from tests.harness.service import Accrue, running


@pytest.fixture
def accrue(tmp_path: Path, database_url: str | None) -> Iterator[Accrue]:
    """A service of the test's own, not started yet."""
    with running(tmp_path, database_url) as accrue:
        yield accrue


@pytest.fixture(autouse=True)
def end_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancels what a failed test has left running in the module's service, where other tests' jobs wait."""
    yield
    if "shared" in request.fixturenames:
        request.getfixturevalue("shared").cancel_jobs()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, server: Server | None) -> Iterator[Accrue]:
    """A service with one worker, for the module's tests."""
    url = server.new_database() if server is not None else None
    with running(tmp_path_factory.mktemp("accrue"), url) as accrue:
        accrue.serve()
        accrue.start("worker")
        yield accrue
    if server is not None and url is not None:
        server.drop(url)
