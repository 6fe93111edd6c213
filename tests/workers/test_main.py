"""What `accrue worker` sets for all of its processes."""

import os
from typing import Any

import pytest

import workers.__main__ as module
from app.settings import Settings


@pytest.mark.parametrize(
    ("offline", "given", "expected"),
    [(True, None, "1"), (True, "", "1"), (True, "0", "0"), (False, None, None)],
)
def test_an_offline_worker_downloads_no_model(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    offline: bool,
    given: str | None,
    expected: str | None,
) -> None:
    """Its trainers would: huggingface_hub in them reads HF_HUB_OFFLINE, which is passed on."""
    monkeypatch.setenv("HF_HUB_OFFLINE", given or "")  # also restores it afterwards
    if given is None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(module, "get_settings", lambda: settings.model_copy(update={"offline": offline}))
    monkeypatch.setattr(module, "end_with_parent", lambda: None)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    found: list[str | None] = []

    class NoSupervisor:
        def __init__(self, *_: Any, **__: Any) -> None:
            found.append(os.environ.get("HF_HUB_OFFLINE"))

        def __getattr__(self, _: str) -> Any:
            return lambda *__: None

    monkeypatch.setattr(module, "Supervisor", NoSupervisor)
    module.main()
    assert found == [expected]
