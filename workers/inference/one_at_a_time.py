"""Answers one choice at a time with transformers' own generation, for families whose rows do not agree."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from workers.inference.choice import Choice
from workers.training.models.model_parts import embeddings_of

Take = Callable[[Choice, Tensor], bool]
"""Takes the logits of a choice's next token; returns whether the choice is to go on."""


def generate(model: Any, choice: Choice, take: Take, device: torch.device) -> None:
    """Makes the tokens of a choice, until it ends.

    Args:
        take: called with the logits of each token; it chooses the token and adds it to `choice.made`.
    """
    chooser = _Chooser(choice, take, embeddings_of(model))
    own = GenerationConfig(
        max_new_tokens=choice.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    given = torch.tensor([choice.prompt], device=device)
    model.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        generation_config=own,
        logits_processor=[chooser],
        stopping_criteria=[_Ended(chooser)],
    )


class _Chooser(LogitsProcessor):
    """Lets `take` choose each token, and leaves it as the only possible one."""

    def __init__(self, choice: Choice, take: Take, readable: int | None) -> None:
        self._choice, self._take, self._readable = choice, take, readable
        self.is_over = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.is_over = not self._take(self._choice, scores[0, : self._readable].float())
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self._choice.made[-1] if self._choice.made else 0] = 0.0
        return chosen


class _Ended(StoppingCriteria):
    def __init__(self, chooser: _Chooser) -> None:
        self._chooser = chooser

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
        return torch.full((len(input_ids),), self._chooser.is_over, device=input_ids.device)
