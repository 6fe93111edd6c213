"""Learning rates for a changed batch, and warmup by batch size."""

from math import sqrt
from typing import Literal

from app.contract.objective import ObjectiveName, ObjectiveSpec

Rule = Literal["sqrt", "linear", "inverse", "none"]


WHY: dict[Rule, str] = {
    "sqrt": "scaling by the square root of the batch's growth keeps the noise of an adaptive optimizer's "
    "update unchanged (Krizhevsky 2014; Malladi et al. 2022)",
    "linear": "with SGD, k times the batch takes k times the rate (Goyal et al. 2017)",
    "inverse": "this factor, 1/K for K micro-batches, is correct only if their gradients are summed; "
    "Accrue averages over the whole window, so choose another rule",
    "none": "the rate stays as it is",
}

_WARMUP_BY_BATCH = ((512, 500), (2_048, 1_000), (8_192, 5_000), (32_768, 10_000))
_WARMUP_BEYOND = 20_000


def scale(rule: Rule, growth: float) -> float:
    """The factor on the learning rate if the batch becomes `growth` times as large."""
    return {"sqrt": sqrt(growth), "linear": growth, "inverse": 1 / growth, "none": 1.0}[rule]


def default_rule(optimizer: str) -> Rule:
    """Linear for SGD and LARS, which is SGD with layer-wise rates; square root for adaptive optimizers."""
    return "linear" if optimizer in ("sgd", "lars") else "sqrt"


def warmup_steps(effective_batch: int, steps_total: int | None = None) -> int:
    """Warmup in updates by the size of the batch, never more than a tenth of a known run."""
    by_batch = next((steps for size, steps in _WARMUP_BY_BATCH if effective_batch <= size), _WARMUP_BEYOND)
    return min(by_batch, steps_total // 10) if steps_total is not None else by_batch


DEFAULT_LEARNING_RATE = 5e-5


LORA_LEARNING_RATE = 2e-4
"""The default for adapters, which start at zero and need a higher rate (Hu et al. 2021; Dettmers et al.
2023)."""


PREFERENCE_LEARNING_RATE = 1e-6
"""For preference objectives, which change a model that can already answer: that of Rafailov et al. 2023,
appendix B, and the default of TRL."""

PREFERENCE_LORA_LEARNING_RATE = 1e-5
"""For preference objectives with adapters, which take about ten times the rate of full fine-tuning."""


REWARD_LEARNING_RATE = 1e-5
"""For reward models, whose head is new: that of Ouyang et al. 2022, appendix C (9e-6), rounded."""

REWARD_LORA_LEARNING_RATE = 1e-4
"""For reward models with adapters: the default of TRL."""


def default_rate(objective: ObjectiveName, *, adapters: bool) -> float:
    """The learning rate of an objective, if none is requested."""
    if objective == "reward":
        return REWARD_LORA_LEARNING_RATE if adapters else REWARD_LEARNING_RATE
    if objective in ("sft", "classification"):
        return LORA_LEARNING_RATE if adapters else DEFAULT_LEARNING_RATE
    return PREFERENCE_LORA_LEARNING_RATE if adapters else PREFERENCE_LEARNING_RATE


def openai_base_rate(objective: ObjectiveSpec | None, *, adapters: bool) -> float:
    """The rate that OpenAI's learning_rate_multiplier multiplies."""
    return DEFAULT_LEARNING_RATE if objective is None else default_rate(objective.name, adapters=adapters)
