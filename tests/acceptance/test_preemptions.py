"""A run that is preempted a hundred times, and goes on with another number of devices each time, trains as
one that was left alone: no sample is lost, and none is used twice."""

import random
import signal
import subprocess
import time
from itertools import cycle
from pathlib import Path

import pytest

from app.contract.spec import Spec
from tests.harness.runs import create_run, log_of, small_data, start_trainer, with_ranks
from tests.harness.specs import make_optimizer, make_spec
from tests.harness.training import finished, log_of_run, weight_difference
from workers.run_directory import INTERRUPTED, RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PREEMPTIONS = 100
STEPS = 1000
SECONDS = 300.0


def planned(run: RunDirectory, spec: Spec, ranks: int, attempt: int) -> RunDirectory:
    """The run, planned for that number of ranks."""
    create_run(run.path, spec, attempt=attempt)
    return with_ranks(run, [1 / ranks] * ranks)


def wait_for_a_moment(run: RunDirectory, trainer: subprocess.Popen[bytes], chance: random.Random) -> None:
    """Waits for up to 11 steps, or for up to 12 s if there is no step until then."""
    before, began = len(log_of_run(run)), time.monotonic()
    steps, seconds = chance.randrange(12), chance.uniform(0.0, 12.0)
    while trainer.poll() is None:
        done = len(log_of_run(run)) - before
        if done >= max(1, steps) or (done == 0 and time.monotonic() > began + seconds):
            return
        time.sleep(0.01)


def test_no_sample_is_lost_or_repeated(tmp_path: Path) -> None:
    """A preemption is SIGTERM, at a random moment: before the first step of an attempt, or after a few. SGD's
    steps are as small as the gradient; Adam's would amplify the rounding of sums over other ranks."""
    spec = make_spec(
        data=small_data(), effective_batch_size=12, max_steps=STEPS, save_every=50,
        optimizer=make_optimizer("sgd", 1e-2),
    )  # fmt: skip
    alone = finished(create_run(tmp_path / "alone", spec), SECONDS)
    run, chance, ranks = create_run(tmp_path / "run", spec), random.Random(1), cycle((1, 3, 2))
    for attempt in range(1, PREEMPTIONS + 1):
        trainer = start_trainer(planned(run, spec, next(ranks), attempt))
        wait_for_a_moment(run, trainer, chance)
        trainer.send_signal(signal.SIGTERM)
        status = trainer.wait(SECONDS)
        assert status in (INTERRUPTED, -signal.SIGTERM), run.trainer_log.read_text()[-3000:]
    finished(planned(run, spec, next(ranks), PREEMPTIONS + 1), SECONDS)
    together, expected = log_of(run), log_of(alone)
    assert [each["step"] for each in together] == list(range(1, STEPS + 1))
    for one, other in zip(together, expected, strict=True):
        assert (one["samples"], one["tokens"], one["epoch"]) == (
            other["samples"], other["tokens"], other["epoch"]
        )  # fmt: skip
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert weight_difference(run, alone) <= 1e-4
