"""One window of samples, made once."""

import numpy as np
import pytest

from tests.training.small_models import VOCABULARY, Window64


@pytest.fixture(scope="session")
def window64() -> Window64:
    """Lengths from 2 to 60; the first third of each is a prompt; two have no target at all."""
    random = np.random.default_rng(3)
    rows = []
    for sample in range(64):
        length = int(random.integers(2, 60))
        counts = np.arange(length) >= length // 3
        rows.append(
            (random.integers(1, VOCABULARY, length).astype(np.int32), counts & (sample not in (5, 40)))
        )
    return Window64(rows)
