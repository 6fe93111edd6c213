"""The default sizes of each family's config, as the installed transformers has them:
`python -m tests.harness.config_defaults` writes them where the planner reads them."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from app.planning import config_defaults
from app.planning.config_defaults import TEXT_FAMILY
from app.planning.estimated_sizes import SIZE_NAMES, TEXT_CONFIGS, TIED
from app.planning.families import FAMILIES, MULTIMODAL
from app.planning.parameter_count import TOWER_SIZE_NAMES, TOWERS

FILE = Path(config_defaults.__file__).with_suffix(".json")


def default_sizes() -> dict[str, dict[str, Any]]:
    """The sizes by family, those of its towers, and the family of its part about text."""
    found = {}
    text_families: set[str] = set()
    for family in sorted(FAMILIES | MULTIMODAL):
        if family in CONFIG_MAPPING:
            found[family] = _of(family)
            text_families |= {found[family].get(TEXT_FAMILY, family)}
    for family in sorted(text_families - found.keys()):
        if family in CONFIG_MAPPING:
            found[family] = _of(family)
    return {family: sizes for family, sizes in sorted(found.items()) if sizes}


def _of(family: str) -> dict[str, Any]:
    config = CONFIG_MAPPING[family]
    names = [name for synonyms in SIZE_NAMES for name in synonyms]
    sizes = {name: value for name in names if type(value := getattr(config, name, None)) is int}
    if type(tied := getattr(config, TIED, None)) is bool:
        sizes[TIED] = tied
    text = next((part for name, part in config.sub_configs.items() if name in TEXT_CONFIGS), None)
    text_family = getattr(text, "model_type", "")
    if text_family:
        sizes[TEXT_FAMILY] = text_family
    return sizes | {name: own for name in TOWERS if (own := _of_tower(config.sub_configs.get(name)))}


def _of_tower(config: Any) -> dict[str, int]:
    names = [name for synonyms in TOWER_SIZE_NAMES for name in synonyms]
    return {name: value for name in names if type(value := getattr(config, name, None)) is int}


def as_text(sizes: dict[str, dict[str, Any]]) -> str:
    """The list as JSON, one family per line."""
    lines = [f"{json.dumps(family)}: {json.dumps(own)}" for family, own in sizes.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_text(default_sizes()))
