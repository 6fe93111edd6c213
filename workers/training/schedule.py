"""The learning rate as a pure function of the number of updates, so no scheduler state is saved."""

from math import cos, pi
from typing import assert_never

from app.contract.spec import ScheduleSpec


def rate_factor(schedule: ScheduleSpec, step: int, steps_total: int) -> float:
    """The share of the peak learning rate for the update number `step`, counted from 0.

    The warmup starts at `warmup_start` and rises linearly or quadratically, or stays constant. Then the rate
    is constant, or falls to `final` at the end, linearly or along half a cosine (Loshchilov and Hutter 2017,
    without restarts). The values are those of transformers. `one_cycle` has PyTorch's values: up along half
    a cosine and down along another (Smith and Topin 2018).
    """
    if schedule.name == "one_cycle":
        return _one_cycle(schedule, step, steps_total)
    warmup = schedule.warmup(steps_total)
    if step < warmup:
        return _warming(schedule, step / max(1, warmup))
    if schedule.name == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps_total - warmup))
    match schedule.name:
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + cos(pi * done))
        case _:
            assert_never(schedule.name)
    return schedule.final + (1.0 - schedule.final) * left


def _warming(schedule: ScheduleSpec, done: float) -> float:
    start = schedule.warmup_start
    match schedule.warmup_shape:
        case "linear":
            return start + (1.0 - start) * done
        case "quadratic":
            return start + (1.0 - start) * done**2
        case "constant":
            return start


def _one_cycle(schedule: ScheduleSpec, step: int, steps_total: int) -> float:
    first = 1.0 / schedule.div_factor
    last = first / schedule.final_div_factor
    top = schedule.pct_start * steps_total - 1.0
    if step < top:
        return _half_cosine(first, 1.0, step / top)
    left = steps_total - 1.0 - top
    if left <= 0:
        return 1.0 if step <= top else last
    return _half_cosine(1.0, last, min(1.0, (step - top) / left))


def _half_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + cos(pi * done))
