"""Pauses between two windows while a GPU is too hot. The supervisor decides when (workers/temperature.py)."""

import time

from workers.training.exceptions import InterruptionRequested
from workers.training.training_run import TrainingRun

_POLL_SECONDS = 0.5


def wait_until_cool(training: TrainingRun) -> None:
    """Returns once no rank's GPU is too hot, or if training is to end with the model as it is.

    Every rank calls it.

    Raises:
        InterruptionRequested: an interruption was requested.
    """
    run, group, began = training.run, training.group, time.monotonic()
    why = run.why_cooling_down() or "a GPU is too hot"
    message = f"Training pauses after step {training.state.step}: {why}."
    training.reporter.event("cooling_down", message, "warning", step=training.state.step)
    is_hot = True
    while is_hot:
        time.sleep(_POLL_SECONDS)
        interrupted, finish, is_hot = group.any(
            training.interrupted(), run.finish_requested(), run.why_cooling_down() is not None
        )
        if interrupted:
            raise InterruptionRequested
        if finish:
            return
    seconds = time.monotonic() - began
    message = f"Training continues after a pause of {seconds:.0f} s."
    training.reporter.event("cooled_down", message, step=training.state.step, seconds=seconds)
