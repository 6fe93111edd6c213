"""The example of docs/security.md: the service mounted in an application with its own users."""

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.settings import get_settings
from tests.harness.requests import JOB

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
TRAINING = "/tuning/gradient-accumulation/training"


def test_the_app_can_be_mounted_in_an_application_with_its_own_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCRUE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("ACCRUE_OFFLINE", "true")
    get_settings.cache_clear()
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    defined: dict[str, Any] = {}
    exec(example, defined)
    with TestClient(defined["platform"], base_url="https://platform.example.org") as client:
        alice, bob = {"x-token": "alice-token"}, {"x-token": "bob-token"}
        made = client.post(f"{TRAINING}/with-accumulation", json=JOB, headers=alice)
        assert made.status_code == 202, made.text
        of_alice = f"{TRAINING}/{made.json()['id']}"
        assert client.get(of_alice, headers=alice).status_code == 200
        assert client.get(of_alice, headers=bob).status_code == 404
        stranger = client.get(of_alice)
        assert (stranger.status_code, stranger.json()["error"]["message"]) == (401, "Sign in first.")
    get_settings.cache_clear()
