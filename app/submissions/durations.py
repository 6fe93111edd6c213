"""The duration of a job before it runs, as a range: from the same model's earlier job, or from the
amount of work."""

from dataclasses import dataclass
from math import ceil

from app.contract.plan import FixedCount, FixedSize, Plan
from app.contract.preview import Lengths
from app.contract.spec import Spec
from app.planning.devices import Device
from app.planning.duration import Duration, fitted, work_of
from app.planning.inputs import PlanningInputs
from app.planning.memory import lora_parameters
from app.planning.plan import samples_of
from app.statistics.performance import Speed

_SAME_FILE, _OTHER_FILE = 0.05, 0.15
"""The spread of the speed of the same model, on the same data and on others."""
_SPREAD_BY_BYTES = 0.3
"""The spread of a sample's tokens that are estimated from its bytes."""
_BYTES_PER_TOKEN = 4.0
_BYTES_OF_KEYS = {
    "text": 12, "prompt_completion": 34, "messages": 70, "preference": 44, "unpaired_preference": 50,
    "classification": 26,
}  # fmt: skip
"""Bytes of a line that are not its text, by format."""
_BYTE_LEVEL_VOCABULARY = 1000
_START_SECONDS = 10.0
"""A job's time outside its windows, until one has been measured."""
_EACH_RANK = 0.93
"""The speed of each of several devices, relative to one alone."""


@dataclass(frozen=True)
class Predicted:
    """What is known of a job's time before it runs."""

    duration: Duration
    tokens: int
    """Tokens in all samples of the run."""


def predict(
    spec: Spec,
    plan: Plan,
    device: Device,
    data_bytes: int,
    speed: Speed | None,
    lengths: Lengths | None,
    inputs: PlanningInputs,
) -> Predicted | None:
    """The duration of a job, from its claim to its end; None if nothing is known of such a device.

    Args:
        data_bytes: the size of the training file.
        speed: what an earlier job with the same model measured.
        lengths: those of the file's samples, if they were measured.
    """
    of_file = speed is not None and speed.is_of_same_file
    counted = speed.tokens_per_sample if speed is not None and of_file else inputs.tokens_per_sample(spec)
    if counted is None and lengths is not None and spec.data.overlength != "split":
        counted = lengths.kept
    if counted is None and speed is not None:
        counted = speed.tokens_per_sample
    length = counted or _length_by_bytes(spec, data_bytes)
    samples = samples_of(spec, plan.steps_total) or _samples_by_bytes(spec, data_bytes)
    steps = plan.steps_total or spec.steps_for(ceil(samples / (spec.epochs or 1)))
    tokens = samples * length
    known = inputs.work_done(device, plan.precision)
    overhead = known.overhead_seconds if known.overhead_seconds is not None else _START_SECONDS
    of_length = 0.0 if counted else _SPREAD_BY_BYTES
    if speed is not None and len(plan.ranks) == 1:
        spread = _SAME_FILE if of_file else _OTHER_FILE
        tokens_per_second = speed.samples_per_second * speed.tokens_per_sample
        windows = Duration.around(tokens / tokens_per_second, spread)
        return Predicted(windows.plus(overhead), round(tokens))
    lora = spec.method.lora
    work = work_of(
        spec.model.architecture,
        tokens=tokens,
        length=length,
        micro_batches=steps * _micro_batches(spec, plan, length),
        steps=steps,
        adapters=lora is not None,
        trained=None if lora is None else lora_parameters(spec.model.architecture, lora),
        checkpointing=spec.gradient_checkpointing,
    )
    rates = fitted(device, plan.precision, known.done, work)
    if rates is None:
        return None
    ranks = len(plan.ranks)
    together = 1.0 if ranks == 1 or plan.device == "cpu" else ranks * _EACH_RANK
    return Predicted(rates.duration(work, of_length).divided(together).plus(overhead), round(tokens))


def _micro_batches(spec: Spec, plan: Plan, length: float) -> float:
    """The expected micro-batches of a window, over all ranks."""
    rule, batch = plan.ranks[0].micro_batch_rule, spec.effective_batch_size
    if isinstance(rule, FixedCount):
        return float(sum(rank.expected_micro_batches for rank in plan.ranks))
    if isinstance(rule, FixedSize):
        return ceil(batch / rule.samples)
    return max(1.0, ceil(batch * length / (rule.unpadded_tokens or rule.tokens)))


def _length_by_bytes(spec: Spec, data_bytes: int) -> float:
    """A sample's tokens, estimated from the bytes of its line."""
    text = max(1.0, data_bytes / max(1, spec.data.examples) - _BYTES_OF_KEYS[spec.data.format])
    vocabulary = spec.model.architecture.vocabulary
    tokens = text if vocabulary < _BYTE_LEVEL_VOCABULARY else text / _BYTES_PER_TOKEN
    return min(float(spec.data.tokens_per_sample), tokens + 2)


def _samples_by_bytes(spec: Spec, data_bytes: int) -> int:
    """The samples that long examples are split into, over all epochs."""
    vocabulary = spec.model.architecture.vocabulary
    per_token = 1.0 if vocabulary < _BYTE_LEVEL_VOCABULARY else _BYTES_PER_TOKEN
    parts = max(spec.data.examples, ceil(data_bytes / per_token / spec.data.tokens_per_sample))
    return parts * (spec.epochs or 1)


def with_duration(plan: Plan, duration: Duration) -> Plan:
    """The plan with a predicted duration."""
    seconds = {
        "predicted_duration_seconds": round(duration.expected, 1),
        "predicted_duration_range": (round(duration.low, 1), round(duration.high, 1)),
    }
    return plan.model_copy(update=seconds)
