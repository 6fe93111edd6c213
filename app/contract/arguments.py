"""Arguments of the optimizers, the schedules, the objectives and the methods of training, by name."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from app.contract.base import Flag, Request, ShortText
from app.contract.spec import OptimizerName, ScheduleName


def _normalise_optimizer_name(given: Any) -> Any:
    """Normalises an optimizer's name. Adam becomes AdamW, which equals it without weight decay."""
    if not isinstance(given, str):
        return given
    name = given.lower().replace("-", "_")
    return {"adam": "adamw", "adamw_torch": "adamw", "adamw8bit": "adamw_8bit"}.get(name, name)


OptimizerChoice = Annotated[OptimizerName, BeforeValidator(_normalise_optimizer_name)]


class OptimizerArguments(Request):
    """Arguments of the chosen optimizer; the defaults are those of its library."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] | None = None
    eps: float | None = Field(None, gt=0, le=1)
    momentum: float | None = Field(None, ge=0, lt=1)
    nesterov: Flag | None = None
    trust_coefficient: float | None = Field(None, gt=0)


class ScheduleArguments(Request):
    """Arguments of the chosen schedule; the defaults give the values of transformers' schedules and, for
    one_cycle, those of PyTorch."""

    warmup_start: float | None = Field(
        None, ge=0, le=1, description="Share of the peak rate at the first update (0; constant warmup: 0.1)"
    )
    final: float | None = Field(None, ge=0, le=1, description="linear, cosine: final share of the peak rate")
    pct_start: float | None = Field(
        None, gt=0, lt=1, description="one_cycle: share of the updates in which the rate rises (0.3)"
    )
    div_factor: float | None = Field(None, ge=1, description="one_cycle: peak rate / first rate (25)")
    final_div_factor: float | None = Field(None, ge=1, description="one_cycle: first / last rate (1e4)")


OPTIMIZER_ARGUMENTS: dict[OptimizerName, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "adamw_8bit": {"betas": (0.9, 0.999), "eps": 1e-8},
    "lion": {"betas": (0.9, 0.99)},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6},
    "lars": {"momentum": 0.9, "nesterov": False, "trust_coefficient": 0.001},
    "sgd": {"momentum": 0.0, "nesterov": False},
    "adafactor": {},
}
"""The arguments that each optimizer takes, with their defaults."""

SCHEDULE_ARGUMENTS: dict[ScheduleName, dict[str, float]] = {
    "constant": {"warmup_start": 0.0},
    "linear": {"warmup_start": 0.0, "final": 0.0},
    "cosine": {"warmup_start": 0.0, "final": 0.0},
    "one_cycle": {"pct_start": 0.3, "div_factor": 25.0, "final_div_factor": 1e4},
}
"""The arguments that each schedule takes, with their defaults."""


class ObjectiveArguments(Request):
    """Arguments of the chosen objective."""

    beta: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="How strongly differences of log-probabilities count (dpo, kto: 0.1; simpo: 2); orpo: "
        "the weight of the odds ratio (0.1)",
    )
    gamma: float | None = Field(
        None, ge=0, le=1000, description="simpo: the target margin between the rewards of a pair (1)"
    )
    label_smoothing: float | None = Field(
        None, ge=0, lt=0.5, description="dpo: the assumed share of pairs that are the wrong way round (0)"
    )
    desirable_weight: float | None = Field(
        None, ge=0, le=1000, description="kto: the weight of the loss of desirable answers (1)"
    )
    undesirable_weight: float | None = Field(
        None, ge=0, le=1000, description="kto: the weight of the loss of undesirable answers (1)"
    )
    center_rewards_coefficient: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="reward: how much the squared sum of a pair's rewards counts, which keeps rewards around "
        "0 (0; 0.01 is usual)",
    )


class LoraConfig(Request):
    r: int = Field(16, ge=1, le=1024, description="Rank of the adapters")
    alpha: int = Field(32, ge=1, le=10_000, description="The adapters' output is scaled by alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: list[ShortText] | None = Field(
        None,
        fail_fast=True,
        min_length=1,
        max_length=100,
        description="Suffixes of module names; null: every linear layer of the language model, and experts, "
        "without the output head and routers",
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _every_linear_layer(cls, given: Any) -> Any:
        """peft's name for every linear layer is accepted, too."""
        return None if given in ("all-linear", ["all-linear"]) else given

    merge: Flag = Field(False, description="Save the model with the adapters merged into it")


class LoraMethod(Request):
    lora: LoraConfig


class QloraMethod(Request):
    qlora: LoraConfig


Method = Literal["full", "lora", "qlora"] | LoraMethod | QloraMethod


def reject_unknown_arguments(field: str, arguments: Request, allowed: set[str], name: str) -> None:
    """Rejects arguments that the chosen optimizer, schedule or objective does not take.

    Args:
        allowed: the names of the arguments that it takes.

    Raises:
        ValueError: there is such an argument; the message lists those that are taken.
    """
    surplus = arguments.model_fields_set - allowed
    if surplus:
        takes = f"it takes {', '.join(sorted(allowed))}" if allowed else "it takes none"
        raise ValueError(f"{field}: {', '.join(sorted(surplus))} is not an argument of {name}; {takes}")
