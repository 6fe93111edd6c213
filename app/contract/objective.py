"""Objectives: what a window's loss is a sum of, and what it is divided by.

Supervised fine-tuning (`sft`) sums over tokens. Preference objectives sum over samples: pairs of a chosen and
a rejected completion (`dpo`, `orpo`, `simpo`), or single completions that are desirable or not (`kto`). Two
objectives train a model that scores whole sequences instead of predicting tokens: `classification` gives a
score to each class of a text, `reward` gives one to each answer of a pair. In each case the denominator is
known before the window begins, so the plan does not change the training.
"""

from typing import Any, Literal

from app.contract.base import Frozen
from app.contract.data_formats import DataFormat

OtherObjectiveName = Literal["dpo", "orpo", "simpo", "kto", "classification", "reward"]
"""The objectives other than supervised fine-tuning."""
ObjectiveName = Literal["sft", "dpo", "orpo", "simpo", "kto", "classification", "reward"]

OBJECTIVE_ARGUMENTS: dict[ObjectiveName, dict[str, Any]] = {
    "sft": {},
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
    "orpo": {"beta": 0.1},
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "classification": {},
    "reward": {"center_rewards_coefficient": 0.0},
}
"""The arguments that each objective takes, with their defaults: those of the papers that
workers/training/losses/objectives.py cites."""

FORMATS: dict[ObjectiveName, tuple[DataFormat, ...]] = {
    "sft": ("text", "prompt_completion", "messages", "unpaired_preference", "classification"),
    "dpo": ("preference",),
    "orpo": ("preference",),
    "simpo": ("preference",),
    "kto": ("unpaired_preference",),
    "classification": ("classification",),
    "reward": ("preference",),
}
"""The formats of data that each objective can learn from. `sft` ignores labels."""

SEQUENCES_PER_SAMPLE: dict[DataFormat, int] = {"preference": 2}
"""The sequences that a sample has in a micro-batch, if they are several: a pair has two."""

DEFAULT_OBJECTIVES: dict[DataFormat, ObjectiveName] = {
    "preference": "dpo", "unpaired_preference": "kto", "classification": "classification",
}  # fmt: skip
"""The objective for data of a format, if none is requested; sft for all others."""

WITH_REFERENCE: frozenset[ObjectiveName] = frozenset({"dpo", "kto"})
"""The objectives that compare with the model that the job starts from."""

OF_SEQUENCES: frozenset[ObjectiveName] = frozenset({"classification", "reward"})
"""The objectives that train a model to score whole sequences."""


class ObjectiveSpec(Frozen):
    """An objective other than supervised fine-tuning. Arguments that it does not take are 0, or 1 for
    weights."""

    name: OtherObjectiveName
    beta: float = 0.0
    """How strongly differences of log-probabilities count; for ORPO, the weight of the odds ratio (λ)."""
    gamma: float = 0.0
    """SimPO's target margin between the rewards of a pair."""
    label_smoothing: float = 0.0
    """DPO: the assumed share of pairs whose answers are the wrong way round."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center_rewards_coefficient: float = 0.0
    """Reward: how much the squared sum of a pair's rewards counts, which keeps rewards around 0."""

    @property
    def scores_sequences(self) -> bool:
        """Whether the model has a head that scores whole sequences, in place of a language model's."""
        return self.name in OF_SEQUENCES

    @property
    def has_reference(self) -> bool:
        return self.name in WITH_REFERENCE

    @property
    def is_of_pairs(self) -> bool:
        return "preference" in FORMATS[self.name]

    @property
    def compares_answers_only(self) -> bool:
        """Whether a pair whose answers are the same trains nothing: its two gradients cancel out."""
        return self.is_of_pairs and self.name != "orpo" and not self.center_rewards_coefficient
