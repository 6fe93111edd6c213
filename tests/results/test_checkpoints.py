"""The list of a job's checkpoints."""

from app.results.checkpoints import list_checkpoints
from app.settings import Settings
from app.storage.database import Database
from app.storage.ids import new_id
from app.storage.tables import Job, JobEvent
from tests.harness.submissions import submitted


def test_a_step_that_was_saved_twice_is_listed_once(database: Database, settings: Settings) -> None:
    """After the last evaluation, the last step is saved a second time."""
    job_id = submitted(database)
    names = ["step-00000008-0000-00000128", "step-00000012-0000-00000192", "step-00000012-0000-00000192-001"]
    with database.writing() as session:
        for name in names:
            (settings.runs_dir / job_id / "checkpoints" / name).mkdir(parents=True)
            data = {"name": name, "step": int(name.split("-")[1])}
            session.add(
                JobEvent(
                    id=new_id("ftevent"), job_id=job_id, created_at=1.0, attempt=1, level="info",
                    type="checkpoint", message="", data=data,
                )
            )  # fmt: skip
            session.flush()
    with database.reading() as session:
        listed = list_checkpoints(session, settings, session.get_one(Job, job_id))
    assert [(each.step, each.name) for each in listed] == [(12, names[2]), (8, names[0])]
