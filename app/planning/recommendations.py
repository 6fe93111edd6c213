"""What to choose where nobody chose: rules, each with its evidence."""

from dataclasses import dataclass
from typing import Any, Literal

from app.planning import learning_rate
from app.schemas.architecture import Architecture
from app.schemas.calculators import Recommendation

SIZES = {"small": 125_000_000, "medium": 350_000_000, "large": 760_000_000, "xl": 1_300_000_000}
"""Parameters that people mean by a size, after the GPT-3 paper's table (Brown et al. 2020, table 2.1)."""

_FINE_TUNING_BATCH = 32
_SHARE_OF_DATA = 0.01

_BASE_RATES = ((200e6, 5e-5), (1e9, 3e-5), (5e9, 2e-5))
_BASE_RATE_BEYOND = 1e-5


@dataclass(frozen=True)
class Situation:
    """What a recommendation is for. `micro_batch` is the largest predicted to fit; 0: none does."""

    architecture: Architecture
    target: int | None
    micro_batch: int
    devices: int
    device_kind: Literal["cpu", "cuda"]
    optimizer: str = "adamw"


def recommended_batch(samples: int | None) -> int:
    """An effective batch by rule: 32, up to 1 % of the data, never more than there is."""
    if samples is None:
        return _FINE_TUNING_BATCH
    by_share = int(samples * _SHARE_OF_DATA)
    return max(1, min(samples, max(_FINE_TUNING_BATCH, min(by_share, 512))))


def recommend(situation: Situation) -> dict[str, Recommendation]:
    """A recommendation for each choice, by name."""
    batch = situation.target or recommended_batch(None)
    micro = max(1, min(situation.micro_batch, -(-batch // situation.devices)))
    steps = -(-batch // (micro * situation.devices))
    return {
        "effective_batch_size": _batch(situation.target, batch),
        "micro_batch_size": _formula(
            micro, "the largest micro-batch predicted to fit, no larger than the target needs", "medium"
        ),
        "accumulation_steps": _formula(
            steps, f"{batch} samples over {situation.devices} device(s) in micro-batches of {micro}", "high"
        ),
        "learning_rate": _rate(situation, batch),
        "warmup_steps": _literature(
            learning_rate.warmup_steps(batch),
            "larger batches take a longer warmup (Goyal et al. 2017); at most a tenth of the run",
            "medium",
        ),
        "optimizer": _optimizer(batch),
        "precision": _precision(situation),
        "gradient_checkpointing": _formula(
            situation.micro_batch == 0,
            "not one sample fits without it"
            if situation.micro_batch == 0
            else "memory suffices without it, and it costs about a third more computation (Chen et al. 2016)",
            "medium",
        ),
        "gradient_clipping": _literature(
            1.0,
            "the global norm that transformers are commonly clipped to (Brown et al. 2020, appendix B)",
            "medium",
        ),
    }


def _batch(target: int | None, batch: int) -> Recommendation:
    if target is not None:
        return _literature(target, "the target that was given", "high")
    return _literature(
        batch,
        "fine-tuning works well with 32 to 64 samples a step where no gradient noise was measured; run a job "
        "and ask again with its id",
        "low",
    ).model_copy(update={"range": [32.0, 64.0]})


def _rate(situation: Situation, batch: int) -> Recommendation:
    base = next(
        (rate for size, rate in _BASE_RATES if situation.architecture.parameters <= size), _BASE_RATE_BEYOND
    )
    rule = learning_rate.default_rule(situation.optimizer)
    scale = learning_rate.scale(rule, batch / _FINE_TUNING_BATCH)
    return _literature(
        float(f"{base * scale:.3g}"),
        f"{base:g} at a batch of {_FINE_TUNING_BATCH} for a model of this size, scaled by {scale:.3g}: "
        f"{learning_rate.WHY[rule]}",
        "low",
    )


def _optimizer(batch: int) -> Recommendation:
    if batch > 8192:
        return _literature(
            "lamb", "beyond 8k samples a step layer-wise rates hold up (You et al. 2020)", "low"
        )
    return _literature("adamw", "the usual choice for transformers (Loshchilov and Hutter 2019)", "high")


def _precision(situation: Situation) -> Recommendation:
    if situation.device_kind == "cpu":
        return _literature("no", "fp32 on a CPU", "high")
    return _literature(
        "bf16",
        "half the activation memory at the range of fp32 (Kalamkar et al. 2019); fp16 on older GPUs",
        "high",
    )


def _literature(value: Any, why: str, confidence: Literal["low", "medium", "high"]) -> Recommendation:
    return Recommendation(value=value, why=why, evidence="literature", confidence=confidence)


def _formula(value: Any, why: str, confidence: Literal["low", "medium", "high"]) -> Recommendation:
    return Recommendation(value=value, why=why, evidence="formula", confidence=confidence)
