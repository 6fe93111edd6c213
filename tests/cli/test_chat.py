from typing import Any

import pytest

from app.cli.chat import _Talk


@pytest.mark.parametrize(
    ("completes", "system", "warns"),
    [(True, "Be brief", True), (True, None, False), (False, "Be brief", False)],
)
def test_a_system_message_that_is_not_used_is_reported(
    capsys: pytest.CaptureFixture[str], completes: bool, system: str | None, warns: bool
) -> None:
    client: Any = None  # it is not used before something is said
    _Talk(client, "ftjob-1", system, {}, completes=completes)
    assert ("--system is not used: ftjob-1 completes what you write" in capsys.readouterr().err) is warns
