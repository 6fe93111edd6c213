"""How the effective batch grows while training: functions of the spec and the state of the run."""

from math import ceil
from statistics import pvariance

from app.contract.reports import NoiseScale
from app.contract.spec import Spec
from workers.training.checkpoints.state import RunState

LOOK_BACK = 10
"""Windows over which the variance of the losses is taken."""


def batch_now(spec: Spec, state: RunState) -> int:
    """The effective batch of the next window, in samples."""
    return state.ramp.batch or spec.batch_at(state.step)


def update(spec: Spec, state: RunState, noise: NoiseScale | None) -> None:
    """Records a step, and adjusts the batch if the ramp follows measurements.

    The ramp `noise_scale` sets the batch to the measured scale, but changes it at most by a factor of 2 per
    step, and never below the requested effective batch. The ramp `loss_variance` doubles the batch while the
    variance of the last losses is above the threshold (Smith et al. 2018 grow the batch for the same
    purpose).
    """
    state.ramp.windows_since_growth += 1
    batch, limit = batch_now(spec, state), spec.ramp.max_effective_batch_size
    if spec.ramp.name == "noise_scale" and noise is not None and noise.high is not None:
        requested = min(max(round(noise.value), ceil(batch / 2)), 2 * batch)
        state.ramp.batch = min(max(requested, spec.effective_batch_size), limit)
    if spec.ramp.name == "loss_variance" and state.ramp.windows_since_growth >= LOOK_BACK and batch < limit:
        recent = state.losses.recent[-LOOK_BACK:]
        if len(recent) == LOOK_BACK and pvariance(recent) > spec.ramp.loss_variance_threshold:
            state.ramp.batch = min(2 * batch, limit)
            state.ramp.windows_since_growth = 0


def steps_total(spec: Spec, state: RunState, samples: int) -> int:
    """Steps of the whole run; an estimate if the ramp follows measurements."""
    if spec.max_steps is not None or spec.ramp.name in ("constant", "linear"):
        return spec.steps_for(samples)
    assert spec.epochs is not None
    batch, at = batch_now(spec, state), state.position
    whole = max(0, spec.epochs - at.epoch - 1) * ceil(samples / batch)
    return state.step + whole + (ceil((samples - at.consumed) / batch) if at.epoch < spec.epochs else 0)
