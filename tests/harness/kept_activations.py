"""What a family's layers keep for the backward pass, relative to the formula for Llama, by simulation:
`python -m tests.harness.kept_activations minicpm3 bamba` prints entries for app/planning/activations.py."""

import sys
from math import ceil
from typing import Any

from transformers import CONFIG_MAPPING

from app.contract.memory_profile import Recipe
from app.planning.activations import attention_scores, kept_by_family, kept_per_score, kept_per_token
from app.planning.architectures import from_config
from app.planning.estimate import ByProfile
from workers.profiling.profile import make_profile

SEQUENCE = 512
_ROWS = (4, 16)
_STEP = 0.05


def default_config(family: str) -> dict[str, Any]:
    """A family's config with its default sizes, as a language model without dropout."""
    config: dict[str, Any] = {**CONFIG_MAPPING[family]().to_dict(), "model_type": family}
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        for name, value in part.items():
            if isinstance(value, float) and any(word in name for word in ("dropout", "pdrop", "drop_rate")):
                part[name] = 0.0
        if "is_decoder" in part:
            part["is_decoder"] = True
    return config


def kept(config: dict[str, Any], recipe: Recipe) -> float:
    """Activations of a micro-batch as simulated, relative to the formula for Llama, without the scores of
    eager attention: by how much they grow with the rows."""
    architecture = from_config(config)
    simulated = ByProfile(make_profile(config, recipe, SEQUENCE).curve, recipe, "simulated")
    few, many = (simulated.memory(rows).activations_bytes for rows in _ROWS)
    per_layer = (many - few) / (_ROWS[1] - _ROWS[0]) / architecture.layers
    per_layer -= attention_scores(architecture, recipe, 1, SEQUENCE) * kept_per_score(architecture, recipe)
    of_llama = kept_per_token(architecture, recipe) / kept_by_family(architecture.family, recipe)
    return per_layer / (SEQUENCE * of_llama)


def main() -> None:
    for family in sys.argv[1:]:
        found = [
            ceil(kept(default_config(family), Recipe(device="cuda", precision=precision)) / _STEP) * _STEP
            for precision in ("bf16", "fp32")
        ]
        print(f'"{family}": ({found[0]:.2f}, {found[1]:.2f}),', flush=True)


if __name__ == "__main__":
    main()
