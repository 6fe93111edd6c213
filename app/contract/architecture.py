"""The sizes of a causal language model that its memory use and its limits depend on."""

import re
from typing import Annotated

from pydantic import StringConstraints

from app.contract.base import Frozen

BUILT_IN_MODEL = "accrue/tiny-gpt2"


class Architecture(Frozen):
    """Sizes from a model's config.json, as plain counts."""

    family: str
    """`model_type` of the config: gpt2, llama, opt, ..."""
    layers: int
    hidden_size: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the feed-forward layer."""
    vocabulary: int
    positions: int
    """The longest sequence the model can take, in tokens."""
    gated: bool
    """A feed-forward with a gate (SwiGLU, GeGLU): three matrices instead of two."""
    experts: int = 1
    """Experts of a layer; 1: a plain feed-forward."""
    active_experts: int = 1
    """Experts that a token goes through."""
    fingerprint: str = ""
    """A digest of config.json without the fields that affect neither shapes nor memory; profiles are stored
    by it."""
    parameters: int
    """All parameters of the model, tied ones counted once."""
    is_estimated: bool = False
    """Whether sizes and `parameters` are estimates, since no rule for the family is known."""


MODEL_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")


ModelName = Annotated[str, StringConstraints(pattern=MODEL_NAME.pattern, max_length=200)]
"""A name or owner/name, never a path."""
