from sqlalchemy import update

from app.devices import live_workers
from app.storage.database import Database
from app.storage.tables import Worker
from workers.health_check import is_alive


def test_a_worker_is_alive_while_its_heartbeat_is_recent(database: Database) -> None:
    assert not is_alive(database, "here")
    with database.writing() as session:
        live_workers.beat(
            session, Worker(id="worker-1", hostname="here", started_at=0.0, devices=[], running=[])
        )
    assert is_alive(database, "here")
    assert not is_alive(database, "elsewhere")
    with database.writing() as session:
        session.execute(update(Worker).values(heartbeat_at=Worker.heartbeat_at - 60))
    assert not is_alive(database, "here")
