"""The learning rate as a function of updates: nothing to save, nothing to get out of step."""

from math import cos, pi

from app.schemas.spec import ScheduleSpec


def warmup_of(schedule: ScheduleSpec, steps_total: int) -> int:
    """Warmup in updates."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return int(schedule.warmup_ratio * steps_total)


def rate_factor(schedule: ScheduleSpec, step: int, steps_total: int) -> float:
    """The share of the peak learning rate for the update number `step`, counted from 0.

    Linear warmup from 0, then constant, or down to 0 at the end linearly or along half a cosine
    (Loshchilov and Hutter, 2017, without restarts): the values of transformers' schedules.
    """
    warmup = warmup_of(schedule, steps_total)
    if step < warmup:
        return step / max(1, warmup)
    if schedule.name == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps_total - warmup))
    return 1.0 - done if schedule.name == "linear" else 0.5 * (1.0 + cos(pi * done))
