"""One window of samples, made once; one thread, since models this small are slower with more."""

import pytest
import torch

from tests.harness import table
from tests.harness.small_models import Window64, make_window64
from workers.training.gradients import direct_sums

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def window64() -> Window64:
    return make_window64()


@pytest.fixture(autouse=True)
def small_weights_are_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of these models' small weights, too, are added to their sums directly."""
    monkeypatch.setattr(direct_sums, "LEAST_ELEMENTS", 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of test_against_trainer.py, where its tests have run."""
    if table.LINES:
        terminalreporter.write_sep("=", "beside Hugging Face Trainer: relative errors")
        for line in table.rendered():
            terminalreporter.write_line(line)
