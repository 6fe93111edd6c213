"""The command's HTTP client, and its messages if no service answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.cli import terminal
from app.cli.client import Client, ServiceError


def test_base_urls_are_accepted_in_the_openai_client_s_form() -> None:
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"):
        with Client(url) as client:
            assert str(client._http.base_url).rstrip("/") == "http://127.0.0.1:8000"


@pytest.mark.parametrize("url", ["banana", "127.0.0.1:8000", ""])
def test_an_invalid_address_is_reported(url: str) -> None:
    with pytest.raises(ServiceError, match="ACCRUE_URL"):
        Client(url)


def test_interrupting_watch_reports_that_the_job_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Service(Client):
        def __init__(self) -> None:
            pass

        def get(self, path: str, **kw: Any) -> Any:
            progress = {
                "step": 1,
                "steps_total": 9,
                "loss": 2.0,
                "tokens_per_second": None,
                "eta_seconds": None,
                "within_window": True,
                "accumulation_step": 3,
            }
            return {"status": "running", "waiting": None, "progress": progress}

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    # only for this module: threads of other tests sleep, too
    monkeypatch.setattr(terminal, "time", SimpleNamespace(sleep=interrupted))
    assert terminal.follow(Service(), "ftjob-1") == 130
    assert "accrue cancel ftjob-1" in capsys.readouterr().out
