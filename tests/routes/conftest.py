"""The application in this process, with a database of its own and no worker."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from app.main import create_app
from app.settings import Settings


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    declared = settings.model_copy(update={"gpus": "24GB,24GB,24GB,24GB"})
    with TestClient(create_app(declared), base_url="http://127.0.0.1:8000") as client:
        yield client
