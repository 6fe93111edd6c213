"""Which of transformers' classes builds a model."""

from typing import Any


def auto_class(config: Any, *, scores: bool = False) -> Any:
    """The auto class for a config: AutoModelForCausalLM, or AutoModelForImageTextToText if only that one
    builds the family, or if the model was saved with its class.

    Args:
        scores: whether the model scores whole sequences: AutoModelForSequenceClassification.

    Raises:
        ValueError: transformers has no such class for the family.

    A model of AutoModelForImageTextToText consists of a language model and of towers for images.
    AutoModelForCausalLM would leave out the towers of some (Qwen 3.5, Llama 4).
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    family = config.model_type
    if scores:
        if family not in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
            raise ValueError(
                f"transformers has no class for sequence classification of the family {family}, which "
                "classification and reward models need: choose a model of another family"
            )
        return AutoModelForSequenceClassification
    if family not in with_images:
        return AutoModelForCausalLM
    named = getattr(config, "architectures", None)
    saved_as = named[0] if isinstance(named, list) and named else None
    if family not in causal or (saved_as == with_images[family] and saved_as != causal[family]):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM
