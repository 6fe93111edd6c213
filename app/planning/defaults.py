"""Defaults of a job that its plan depends on."""

from app.contract.arguments import (
    LoraConfig,
    LoraMethod,
    Method,
    QloraMethod,
)
from app.contract.model_reference import LoraSpec
from app.contract.spec import MemoryLimits, MethodSpec
from app.errors import Unprocessable

DEFAULT_EPOCHS = 3


DEFAULT_MAX_LENGTH = 1024


def memory_limits(
    max_memory_usage: float, margin: float | None, measured: float | None = None
) -> MemoryLimits:
    """The memory limits; without a requested margin, the measured or else the default margin applies."""
    own = next((each for each in (margin, measured) if each is not None), DEFAULT_SAFETY_MARGIN)
    return MemoryLimits(max_memory_usage=max_memory_usage, memory_safety_margin=own)


def method_spec(method: Method) -> MethodSpec:
    """A method with every default filled in.

    Raises:
        Unprocessable: qlora with adapters to be merged.
    """
    match method:
        case "full":
            return MethodSpec(name="full", lora=None)
        case "lora" | "qlora" as name:
            return MethodSpec(name=name, lora=_lora(LoraConfig()))
        case LoraMethod(lora=config):
            return MethodSpec(name="lora", lora=_lora(config))
        case QloraMethod(qlora=config):
            if config.merge:
                raise Unprocessable(
                    "qlora: adapters cannot be merged into 4-bit weights: leave merge out, or choose lora.",
                    field="training_config.method",
                )
            return MethodSpec(name="qlora", lora=_lora(config))


DEFAULT_SAFETY_MARGIN = 0.1
"""Applies until predictions have been compared with measurements."""


def _lora(config: LoraConfig) -> LoraSpec:
    targets = tuple(config.target_modules) if config.target_modules is not None else None
    return LoraSpec(**{**config.model_dump(), "target_modules": targets})
