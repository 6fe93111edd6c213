"""What people read if transformers refuses a model's configuration."""

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness.small_models import CONFIGS
from workers.training.models.loading_errors import reason_of


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hidden_act": "gleu"}, 'transformers does not know "gleu", config.json\'s hidden_act'),
        (
            {"rope_parameters": {"rope_type": "yarm", "factor": 2.0, "rope_theta": 1e4}},
            'transformers does not know "yarm", config.json\'s rope_parameters.rope_type',
        ),
        ({"num_attention_heads": 5}, "is not a multiple of the number of attention heads (5)"),
        ({"hidden_size": "32"}, "Field 'hidden_size' expected int, got str"),
        ({"model_type": "lama"}, "Unrecognized model identifier: lama."),
    ],
)
def test_a_refused_configuration_is_explained(changed: dict[str, Any], reason: str) -> None:
    config = {**CONFIGS["llama"]().to_dict(), **changed}
    with pytest.raises((KeyError, ValueError, StrictDataclassError)) as refused:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert reason in reason_of(refused.value, config)
    assert "afmoe" not in reason_of(refused.value, config), "without the list of all model types"


def test_a_missing_key_is_named() -> None:
    assert reason_of(KeyError("factor"), {"rope_scaling": {"rope_type": "yarn"}}) == "KeyError: 'factor'"


def test_a_reason_names_no_path_and_needs_no_valid_configuration() -> None:
    path = "/srv/" + "a" * 600
    found = reason_of(OSError(f"no file in {path}, or in its parent"), ["no object"], {path: "me/model"})
    assert found == "no file in me/model, or in its parent"
    assert len(reason_of(OSError("x" * 1000))) == 500


def test_an_error_without_text_is_named_by_its_type() -> None:
    assert reason_of(AssertionError()) == "AssertionError"
