"""Recommended values for what the user left open: rules, each with its evidence."""

from dataclasses import dataclass
from typing import Any, Literal

from app.contract.accumulation import MAX_ACCUMULATION_STEPS, MAX_EFFECTIVE_BATCH, ClipMode
from app.contract.architecture import Architecture
from app.contract.objective import ObjectiveName
from app.contract.plan import Source
from app.contract.reports import NoiseScale
from app.contract.spec import OptimizerName, RunPrecision
from app.planning import learning_rate
from app.planning.learning_rate import LORA_LEARNING_RATE
from app.planning.schemas import Recommendation

SIZES = {"small": 125_000_000, "medium": 350_000_000, "large": 760_000_000, "xl": 1_300_000_000}
"""Parameter counts by size name, from the GPT-3 paper (Brown et al. 2020, table 2.1)."""

ModelKind = Literal["transformer", "vision", "recurrent"]
Confidence = Literal["low", "medium", "high"]

_FINE_TUNING_BATCH = 32
_LARGE_BATCH = 8192
_LARGE_VISION_BATCH = 4096
"""Above this batch, convolutional networks lost accuracy without layer-wise rates (You et al. 2017)."""
_NARROW, _WIDE = 2.0, 6.0
"""Confidence is high if the upper end of a noise scale's interval is at most `_NARROW` times its lower end,
and medium if it is at most `_WIDE` times."""

_LEAST_SHARE_OF_DATA, _SHARE_OF_DATA = 0.001, 0.01
_MOST_BY_SHARE = 512

_BASE_RATES = ((200e6, 5e-5), (1e9, 3e-5), (5e9, 2e-5))
_BASE_RATE_BEYOND = 1e-5
_RATE_RELATIVE_TO_ADAMW: dict[str, float] = {"lion": 0.2, "lamb": 3.0}
"""Learning rates relative to AdamW's: Lion needs three to ten times less (Chen et al. 2023), and LAMB's trust
ratio allows more (You et al. 2020)."""
_ABSOLUTE_RATE: dict[str, float] = {"sgd": 1e-2, "lars": 0.025, "adafactor": 1e-3}
"""Learning rates independent of AdamW's: Adafactor's is relative (Raffel et al. 2020), SGD's and LARS's are
customary."""


@dataclass(frozen=True)
class MeasuredNoise:
    """A gradient noise scale, the job that measured it, and the number of that job's samples."""

    job_id: str
    scale: NoiseScale
    samples: int | None


@dataclass(frozen=True)
class MeasuredRate:
    """A peak learning rate with which a job's loss fell, at its batch and with its optimizer."""

    job_id: str
    rate: float
    batch: int
    optimizer: OptimizerName
    adapters: bool
    first_loss: float
    final_loss: float


@dataclass(frozen=True)
class Situation:
    """What a recommendation is for. `micro_batch` is the largest predicted to fit; 0: none does, not even
    with gradient checkpointing."""

    architecture: Architecture
    target: int | None
    micro_batch: int
    devices: int
    device_kind: Literal["cpu", "cuda"]
    source: Source = "formula"
    """Where `micro_batch` is from."""
    checkpointing: bool = False
    """Whether `micro_batch` is with gradient checkpointing, since not one sample fits without it."""
    remedy: str | None = None
    """If no sample fits at all: the smallest change with which one does; None: there is none."""
    precision: RunPrecision = "fp32"
    optimizer: OptimizerName | None = None
    """None: to be recommended."""
    adapters: bool = False
    """LoRA or QLoRA, instead of all weights."""
    samples: int | None = None
    """The number of training samples; None if unknown."""
    clip_mode: ClipMode = "after_accumulation"
    measured_rate: MeasuredRate | None = None
    noise: MeasuredNoise | None = None
    useful: int | None = None
    """The micro-batch beyond which throughput does not grow; None: unknown."""
    sample_tokens: int | None = None
    """Tokens of the samples that `micro_batch` and `useful` count; None: the default length."""
    useful_is_measured: bool = False
    """Whether `useful` was measured with this model on such a device; otherwise it is a rule of thumb."""
    kind: ModelKind = "transformer"
    steps_total: int | None = None
    """Optimizer steps of the run; None: not known."""
    objective: ObjectiveName = "sft"


def recommended_batch(samples: int | None) -> int:
    """An effective batch by rule: 1 % of the samples, at least 32, at most 512, and never more than all."""
    if samples is None:
        return _FINE_TUNING_BATCH
    by_share = int(samples * _SHARE_OF_DATA)
    return max(1, min(samples, max(_FINE_TUNING_BATCH, min(by_share, _MOST_BY_SHARE))))


def recommend(situation: Situation) -> dict[str, Recommendation]:
    """A recommendation for each choice, by name; together they can be submitted as they are."""
    wanted = situation.target or _batch_by_noise(situation.noise) or recommended_batch(situation.samples)
    batch, micro = _feasible_batch(situation, min(wanted, MAX_EFFECTIVE_BATCH))
    steps = -(-batch // (micro * situation.devices))
    optimizer, of_micro = _optimizer(situation, batch), _micro_batch(situation, micro)
    return {
        "effective_batch_size": _batch(situation, batch, wanted),
        "micro_batch_size": of_micro,
        "accumulation_steps": Recommendation(
            value=steps,
            why=f"{batch} samples over {situation.devices} device{'s' * (situation.devices > 1)} in "
            f"micro-batches of {micro}",
            evidence=of_micro.evidence,
            confidence=of_micro.confidence,
        ),
        "learning_rate": _rate(situation, optimizer.value, batch),
        "warmup_steps": _literature(
            learning_rate.warmup_steps(batch, situation.steps_total),
            "larger batches take a longer warmup (Goyal et al. 2017), but at most a tenth of a run's steps"
            + ("" if situation.steps_total is None else f" ({situation.steps_total} steps here)"),
            "medium",
        ),
        "optimizer": optimizer,
        "precision": _precision(situation),
        "gradient_checkpointing": _predicted(
            situation,
            situation.checkpointing,
            "not one sample fits without it"
            if situation.checkpointing
            else "memory suffices without it, and it costs about a third more computation (Chen et al. 2016)",
            "medium",
        ),
        "gradient_clipping": _clipping(situation, batch, steps),
    }


def feasibility(situation: Situation) -> list[str]:
    """Advice if not even one sample fits; otherwise none."""
    if situation.micro_batch:
        return []
    remedy = (
        "use a device with more memory, or a smaller model"
        if situation.remedy is None
        else f"set {situation.remedy}"
    )
    return [f"Not even one sample is predicted to fit with these values, so the job would fail: {remedy}."]


def _feasible_batch(situation: Situation, batch: int) -> tuple[int, int]:
    """A batch and a micro-batch that make no more accumulation steps than a job may have."""
    devices = situation.devices
    most = min(situation.micro_batch, situation.useful or situation.micro_batch)
    if most * devices * MAX_ACCUMULATION_STEPS < batch:
        most = situation.micro_batch  # otherwise the batch would have to be smaller
    micro = max(1, min(most, -(-batch // devices)))
    return min(batch, micro * devices * MAX_ACCUMULATION_STEPS), micro


def _is_usable(noise: MeasuredNoise | None) -> bool:
    """Whether a batch can be chosen by a noise scale. A scale below one sample is not usable: its error is
    larger than its value, and no batch is smaller than one sample."""
    return noise is not None and noise.scale.value >= 1.0


def _batch_by_noise(noise: MeasuredNoise | None) -> int | None:
    """The noise scale as the batch: training then needs twice the minimum number of samples, and twice the
    minimum number of steps."""
    if not _is_usable(noise):
        return None
    assert noise is not None
    return max(1, min(round(noise.scale.value), noise.samples or round(noise.scale.value)))


def _batch(situation: Situation, batch: int, wanted: int) -> Recommendation:
    if batch < wanted:
        return _predicted(
            situation,
            batch,
            f"the largest batch that {MAX_ACCUMULATION_STEPS} accumulation steps of the largest fitting "
            f"micro-batch can reach; {wanted} would be better",
            "medium",
        )
    if situation.target is not None:
        return _requested(situation.target, "the target that was given")
    if situation.noise is not None and _is_usable(situation.noise):
        return _measured_batch(situation.noise, batch)
    if situation.samples is not None:
        shares = (_LEAST_SHARE_OF_DATA, _SHARE_OF_DATA)
        usual = [max(1.0, min(situation.samples * share, _MOST_BY_SHARE)) for share in shares]
        return _literature(
            batch,
            f"rule of thumb: 0.1 to 1 % of the {situation.samples} samples, but at least "
            f"{_FINE_TUNING_BATCH} if there are that many, and at most {_MOST_BY_SHARE}. For a measured "
            "value, run a job and request recommendations with its training_id",
            "low",
        ).model_copy(update={"range": [usual[0], max(usual[1], float(batch))]})
    return _literature(
        batch,
        "rule of thumb: fine-tuning works well with 32 to 64 samples per step. For a measured value, run a "
        "job and request recommendations with its training_id",
        "low",
    ).model_copy(update={"range": [32.0, 64.0]})


def _measured_batch(noise: MeasuredNoise, batch: int) -> Recommendation:
    scale, high = noise.scale, noise.scale.high
    band = f"{scale.low:.0f} to {high:.0f}" if high is not None else f"{scale.low:.0f} and more"
    spread = high / max(scale.low, 1e-9) if high is not None else float("inf")
    confidence: Confidence = "high" if spread <= _NARROW else "medium" if spread <= _WIDE else "low"
    return Recommendation(
        value=batch,
        why=f"job {noise.job_id} measured a gradient noise scale of {scale.value:.0f} samples (90 % "
        f"interval: {band}, from {scale.measurements} windows): about that many samples per step waste "
        "neither samples nor steps (McCandlish et al. 2018, section 2.3)",
        evidence="measured",
        confidence=confidence,
        range=[scale.low, high if high is not None else float(noise.samples or scale.value)],
    )


def _micro_batch(situation: Situation, micro: int) -> Recommendation:
    if micro == situation.useful and micro < situation.micro_batch and not situation.useful_is_measured:
        return _literature(
            micro,
            f"a CPU is hardly faster with larger micro-batches of this model (rule of thumb), if samples "
            f"{_as_long_as(situation)}; run accrue tune to measure it. {_LEFT_TO_THE_PLAN}",
            "medium",
        )
    if micro == situation.useful and micro < situation.micro_batch:
        return Recommendation(
            value=micro,
            why="a tuning run on this kind of device measured no gain from larger micro-batches (up to "
            f"{situation.micro_batch} samples would fit), if samples {_as_long_as(situation)}. "
            f"{_LEFT_TO_THE_PLAN}",
            evidence="measured",
            confidence="high",
        )
    if not situation.micro_batch:
        return _predicted(
            situation, micro, "the smallest there is; not even this one fits: see advice", "high"
        )
    return _predicted(
        situation,
        micro,
        "the largest micro-batch predicted to fit, no larger than the target needs, if samples "
        f"{_as_long_as(situation)}. {_LEFT_TO_THE_PLAN}",
        "medium" if situation.source == "formula" else "high",
    )


_LEFT_TO_THE_PLAN = (
    "Leave it out of a job: the plan puts more samples into a micro-batch where they are shorter"
)


def _as_long_as(situation: Situation) -> str:
    tokens = situation.sample_tokens
    return "have the default length" if tokens is None else f"have {tokens:,} tokens"


def _clipping(situation: Situation, batch: int, steps: int) -> Recommendation:
    whole = _clipping_of_the_whole(batch, situation.kind)
    if situation.clip_mode != "each_micro_batch" or steps == 1:
        return whole
    return _literature(
        float(f"{whole.value / steps**0.5:.3g}"),
        f"{whole.value:g} divided by the square root of {steps} accumulation steps: rule of thumb for "
        "clipping after every micro-batch",
        "low",
    )


def _clipping_of_the_whole(batch: int, kind: ModelKind) -> Recommendation:
    if batch > _LARGE_BATCH:
        return _literature(
            0.25, "rule of thumb: beyond 8k samples per step, a gradient has little noise", "low"
        )
    if kind == "vision":
        return _literature(5.0, "usual for image models: a loose limit that only cuts outliers", "low")
    if kind == "recurrent":
        return _literature(
            0.5,
            "gradients through time can explode; any limit between 0.5 and 10 times the usual norm works "
            "(Pascanu et al. 2013)",
            "low",
        )
    return _literature(
        1.0,
        "the global norm that transformers are commonly clipped to (Brown et al. 2020, appendix B)",
        "medium",
    )


def _rate(situation: Situation, optimizer: OptimizerName, batch: int) -> Recommendation:
    learned = situation.measured_rate
    if learned is None or (learned.optimizer, learned.adapters) != (optimizer, situation.adapters):
        if situation.objective not in ("sft", "classification"):
            usual = learning_rate.default_rate(situation.objective, adapters=situation.adapters)
            return _literature(usual, f"the default for {situation.objective}, whatever the batch", "low")
        return recommended_rate(
            situation.architecture.parameters, optimizer, batch, adapters=situation.adapters
        )
    rule = learning_rate.default_rule(optimizer)
    scale = learning_rate.scale(rule, batch / learned.batch)
    scaled = (
        "" if batch == learned.batch else f". The rate is scaled by {scale:.3g}: {learning_rate.WHY[rule]}"
    )
    return Recommendation(
        value=float(f"{learned.rate * scale:.3g}"),
        why=f"with {learned.rate:g} at a batch of {learned.batch} the loss of job {learned.job_id} fell from "
        f"{learned.first_loss:.3g} to {learned.final_loss:.3g}{scaled}",
        evidence="measured",
        confidence="medium",
    )


def recommended_rate(
    parameters: int, optimizer: OptimizerName, batch: int, *, adapters: bool = False
) -> Recommendation:
    """A peak learning rate by rule: from the model's size, scaled for the batch by the optimizer's rule."""
    by_size = next((rate for size, rate in _BASE_RATES if parameters <= size), _BASE_RATE_BEYOND)
    base = (LORA_LEARNING_RATE if adapters else by_size) * _RATE_RELATIVE_TO_ADAMW.get(optimizer, 1.0)
    base = _ABSOLUTE_RATE.get(optimizer, base)
    rule = learning_rate.default_rule(optimizer)
    grown = min(batch, _LARGE_BATCH) if rule == "linear" else batch  # tested up to here
    scale = learning_rate.scale(rule, grown / _FINE_TUNING_BATCH)
    what = "adapters" if adapters else "a model of this size"
    return _literature(
        float(f"{base * scale:.3g}"),
        f"{base:g} with {optimizer} at a batch of {_FINE_TUNING_BATCH} for {what}, scaled by {scale:.3g}: "
        f"{learning_rate.WHY[rule]}",
        "low",
    )


def _optimizer(situation: Situation, batch: int) -> Recommendation:
    if situation.optimizer is not None:
        return _requested(situation.optimizer, "the optimizer that was given")
    if situation.kind == "vision" and batch >= _LARGE_VISION_BATCH:
        return _literature(
            "lars",
            f"with {_LARGE_VISION_BATCH} or more images per step, layer-wise rates keep the accuracy of "
            "image models (You et al. 2017)",
            "medium",
        )
    if batch > _LARGE_BATCH:
        return _literature(
            "lamb", "beyond 8k samples per step, layer-wise rates still work (You et al. 2020)", "low"
        )
    return _literature("adamw", "the usual choice for transformers (Loshchilov and Hutter 2019)", "high")


def _precision(situation: Situation) -> Recommendation:
    if situation.device_kind == "cpu":
        return _literature("no", "fp32 on a CPU", "high")
    if situation.precision == "fp16":
        return _literature("fp16", "this GPU does not support bf16: fp16 with loss scaling", "high")
    return _literature(
        "bf16", "half the activation memory at the range of fp32 (Kalamkar et al. 2019)", "high"
    )


def _requested(value: Any, why: str) -> Recommendation:
    return Recommendation(value=value, why=why, evidence="requested", confidence="high")


def _literature(value: Any, why: str, confidence: Confidence) -> Recommendation:
    return Recommendation(value=value, why=why, evidence="literature", confidence=confidence)


def _predicted(situation: Situation, value: Any, why: str, confidence: Confidence) -> Recommendation:
    return Recommendation(value=value, why=why, evidence=situation.source, confidence=confidence)
