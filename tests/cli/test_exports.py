from pathlib import Path

import huggingface_hub
import pytest

from app.cli.client import ServiceError
from app.cli.exports import _pushed


class Unreachable:
    def create_repo(self, *_: object, **__: object) -> str:
        raise RuntimeError("Name or service not known")  # the hub's client has errors of several libraries


def test_a_hub_that_cannot_be_reached_leaves_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Unreachable)
    with pytest.raises(ServiceError, match="were not pushed to me/tuned: Name or service not known"):
        _pushed(tmp_path, "me/tuned", private=True)
