"""One window of samples, made once."""

import pytest

from tests.training.small_models import Window64, make_window64


@pytest.fixture(scope="session")
def window64() -> Window64:
    return make_window64()
