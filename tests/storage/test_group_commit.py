"""Group commits: what each caller receives, and what is stored afterwards."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from app.errors import Conflict
from app.storage.database import Database
from app.storage.group_commit import GroupCommit
from app.storage.tables import Configuration


def kept(name: str, content: str = "") -> Callable[[None, Database], str]:
    """A write that stores a row and returns its name."""

    def write(_: None, database: Database) -> str:
        with database.writing() as session:
            session.add(Configuration(id=name, created_at=0.0, given={"note": content}, num_gpus=1))
        return name

    return write


def refused(_: None, database: Database) -> str:
    with database.writing() as session:
        session.add(Configuration(id="half", created_at=0.0, given={}, num_gpus=1))
        session.flush()
        raise Conflict("not that one")


def nothing() -> None:
    pass


def all_at_once(database: Database, *writes: Callable[[None, Database], str]) -> list[str | BaseException]:
    """What each caller receives if all writes arrive while the thread is busy, and so form one group."""
    busy = threading.Event()

    async def ask() -> list[str | BaseException]:
        group = GroupCommit(database)
        group.start()
        first = asyncio.ensure_future(group.write(database, busy.wait, lambda _, __: "first"))
        others = [asyncio.ensure_future(group.write(database, nothing, write)) for write in writes]
        await asyncio.sleep(0)
        busy.set()
        heard = await asyncio.gather(first, *others, return_exceptions=True)
        await asyncio.to_thread(group.close)
        return heard[1:]

    return run(ask())


def run(requested: Coroutine[Any, Any, list[str | BaseException]]) -> list[str | BaseException]:
    return asyncio.run(requested)


def there(database: Database) -> set[str]:
    with database.reading() as session:
        return set(session.scalars(select(Configuration.id)))


def test_a_group_is_one_commit(database: Database) -> None:
    commits = []
    event.listen(database.engine, "commit", commits.append)
    names = [f"c-{number}" for number in range(20)]
    assert all_at_once(database, *(kept(name) for name in names)) == names
    assert there(database) == set(names)
    assert len(commits) <= 2  # of the one that kept the thread busy, and of the group


def test_a_failed_write_does_not_affect_the_others(database: Database) -> None:
    heard = all_at_once(database, kept("before"), refused, kept("before"), kept("after"))
    assert heard[0] == "before"
    assert isinstance(heard[1], Conflict)
    assert isinstance(heard[2], IntegrityError)
    assert heard[3] == "after"
    assert there(database) == {"before", "after"}


def test_a_write_whose_preparation_fails_is_skipped(database: Database) -> None:
    def unsound() -> None:
        raise Conflict("unsound")

    async def ask() -> list[str | BaseException]:
        group = GroupCommit(database)
        group.start()
        requested = [group.write(database, prepare, kept("it")) for prepare in (unsound, nothing)]
        heard = await asyncio.gather(*requested, return_exceptions=True)
        await asyncio.to_thread(group.close)
        return heard

    heard = run(ask())
    assert isinstance(heard[0], Conflict)
    assert heard[1] == "it"


def test_no_result_is_returned_before_the_commit_succeeds(database: Database) -> None:
    def fail(_: object) -> None:
        raise OSError("the disk is gone")

    event.listen(database.engine, "commit", fail)
    heard = all_at_once(database, kept("one"), kept("two"))
    assert [str(each) for each in heard] == ["the disk is gone"] * 2
    event.remove(database.engine, "commit", fail)
    assert there(database) == set()
    assert all_at_once(database, kept("three")) == ["three"]


@pytest.mark.sqlite
def test_a_full_disk_leaves_earlier_writes_either_failed_or_stored(database: Database) -> None:
    with database.engine.connect() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar_one()

    def full(driver: Any, record: object) -> None:
        driver.execute(f"PRAGMA max_page_count={pages + 4}")

    database.engine.dispose()
    event.listen(database.engine, "connect", full)
    heard = all_at_once(database, kept("small"), kept("large", "x" * 10**6), kept("after"))
    assert isinstance(heard[1], DBAPIError)
    told = {each for each in heard if isinstance(each, str)}
    assert there(database) == told


@pytest.mark.sqlite
def test_a_transaction_rolled_back_by_sqlite_fails_for_all_callers(database: Database) -> None:
    def lost(_: None, within: Database) -> str:
        with within.writing() as session:
            session.execute(text("ROLLBACK"))  # as SQLite does by itself when a write fails badly
            raise OSError("the disk is gone")

    heard = all_at_once(database, kept("before"), lost, kept("after"))
    assert [str(each) for each in heard] == ["the disk is gone"] * 3
    assert there(database) == set()


def test_close_writes_all_pending_requests(database: Database) -> None:
    async def ask() -> list[str | BaseException]:
        group = GroupCommit(database)
        group.start()
        requested = [
            asyncio.ensure_future(group.write(database, nothing, kept(f"c-{n}"))) for n in range(120)
        ]
        await asyncio.sleep(0)
        await asyncio.to_thread(group.close)
        return list(await asyncio.gather(*requested))

    assert run(ask()) == [f"c-{n}" for n in range(120)]
    assert len(there(database)) == 120
