"""Sessions see only their owner's rows, and leave other sessions of the process alone."""

from sqlalchemy import orm, select

from app.storage.database import Database
from app.storage.session import OF_EVERYONE, Viewer
from app.storage.tables import Configuration


def kept(database: Database, viewer: Viewer, name: str) -> None:
    with database.seen_by(viewer).writing() as session:
        session.add(Configuration(id=name, created_at=1.0, given={}, num_gpus=1))


def seen(database: Database, viewer: Viewer) -> list[str]:
    with database.seen_by(viewer).reading() as session:
        return sorted(session.scalars(select(Configuration.id)))


def test_a_viewer_sees_and_creates_only_own_rows_and_an_administrator_sees_all(database: Database) -> None:
    alice, bob, admin = Viewer("a", "a"), Viewer("b", "b"), Viewer(None, "admin")
    for viewer, name in ((alice, "of-alice"), (bob, "of-bob"), (admin, "of-admin")):
        kept(database, viewer, name)
    assert seen(database, alice) == ["of-alice"]
    assert seen(database, bob) == ["of-bob"]
    assert seen(database, admin) == seen(database, Viewer()) == ["of-admin", "of-alice", "of-bob"]
    with database.seen_by(alice).reading() as session:
        assert session.get(Configuration, "of-bob") is None
        assert len(session.scalars(select(Configuration), execution_options=OF_EVERYONE).all()) == 3
        assert (session.shows("a"), session.shows("b")) == (True, False)


def test_sessions_of_a_host_application_are_not_filtered(database: Database) -> None:
    kept(database, Viewer("a", "a"), "of-alice")
    with orm.Session(database.engine, info={"owner": "b", "maker": "b"}) as session:
        assert session.scalars(select(Configuration.id)).all() == ["of-alice"]
        session.add(Configuration(id="made", created_at=1.0, given={}, num_gpus=1))
        session.flush()
        assert session.get_one(Configuration, "made").owner is None
