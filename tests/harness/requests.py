"""A request for a job, and its submission to the application in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi.testclient import TestClient

from app.main import create_app
from app.security import keys
from app.security.scopes import Scope
from app.settings import Settings
from app.storage.database import Database

PATH = "/gradient-accumulation/training"


JOB: dict[str, Any] = {
    "model_name": "accrue/tiny-gpt2",
    "dataset_config": {"texts": ["sample text 1", "sample text 2"], "max_length": 512},
    "training_config": {"epochs": 3, "learning_rate": 5e-5},
    "user_id": 123,
    "target_effective_batch_size": 64,
    "accumulation_steps": 8,
}


def submit(client: TestClient, **changes: Any) -> Any:
    answer = client.post(f"{PATH}/with-accumulation", json={**JOB, **changes})
    assert answer.status_code == 202, answer.text
    return answer.json()


def key_for(database: Database, *scopes: Scope, **more: Any) -> dict[str, str]:
    """Creates a key and returns its Authorization header."""
    with database.writing() as session:
        _, key = keys.create(session, "test", scopes or ("read", "write"), more.get("expires_in_seconds"))
    return {"Authorization": f"Bearer {key}"}


@contextmanager
def service(settings: Settings, **changes: Any) -> Iterator[tuple[TestClient, dict[str, str]]]:
    """A service with changed settings, and the header of one of its keys."""
    app = create_app(settings.model_copy(update=changes))
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client, key_for(app.state.database)
