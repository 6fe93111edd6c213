"""Several choices computed together: each forward pass makes one token of every row.

Rows join when their prompt has been read, and leave when they end; the others go on. A prompt is read alone,
without padding.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workers.inference import cache_rows
from workers.inference.choice import Choice
from workers.training.models.model_parts import embeddings_of

_TOKENS_AT_ONCE = 2048
"""The tokens of a prompt that one forward pass reads."""


class Forward:
    """Forward passes of a model, with the arguments that its family takes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._takes = inspect.signature(model.forward).parameters
        self._readable = embeddings_of(model)

    def __call__(self, tokens: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """The logits after the last token of each row, of shape [rows, vocabulary], and the cache.

        Args:
            tokens: of shape [rows, new columns].
            mask: 0 for padding; of shape [rows, all columns].
            cache: the cache of the columns before; None if there are none.
        """
        options: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        if "position_ids" in self._takes:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            options["position_ids"] = positions[:, -tokens.shape[1] :]
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = 1
        found = self._model(input_ids=tokens, **options)
        logits = found.logits[:, -1, : self._readable]  # a head may have more tokens than the embeddings
        return logits.float(), getattr(found, "past_key_values", None)


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt that the model has read, and the choices that continue it."""

    choices: Sequence[Choice]
    cache: Any
    columns: int
    """The number of tokens that were read."""
    logits: Tensor
    """Those after the last token, of shape [vocabulary]."""


@dataclass(eq=False)
class Batch:
    """The rows of one cache."""

    model: Any
    device: torch.device
    rows: list[Choice] = field(default_factory=list)
    _cache: Any = None
    _columns: int = 0
    """The tokens that each row of the cache has, padding included."""
    _padding: list[int] = field(default_factory=list)
    """The columns of padding of each row."""

    def __post_init__(self) -> None:
        self._forward = Forward(self.model)

    @property
    def cache(self) -> Any:
        """The cache of all rows; None without rows."""
        return self._cache

    @property
    def columns_at_most(self) -> int:
        """How many columns the cache may come to have."""
        return max((row.longest for row in self.rows), default=0)

    def takes(self, choices: Sequence[Choice], tokens_at_most: int) -> bool:
        """Whether choices should join: the padded cache then has at most `tokens_at_most` tokens and, unless
        the batch is empty, at most about half of it is padding, plus an allowance."""
        rows = [*self.rows, *choices]
        if len(rows) > 1 and any(row.failed_passes > 1 for row in rows):
            return False
        padded = len(rows) * max(row.longest for row in rows)
        is_even = padded <= 2 * sum(row.longest for row in rows) + _TOKENS_AT_ONCE
        return padded <= tokens_at_most and (is_even or not self.rows)

    def read(self, choices: Sequence[Choice]) -> ReadPrompt:
        """Reads the prompt that these choices share (or, of a single one, also the tokens that it has made),
        without changing the batch: an error concerns these choices only."""
        cache, columns = None, 0
        prompt = [*choices[0].prompt, *choices[0].made]
        logits = torch.empty(0)
        while columns < len(prompt):
            part = prompt[columns : columns + _TOKENS_AT_ONCE]
            columns += len(part)
            tokens = torch.tensor([part], device=self.device)
            logits, cache = self._forward(tokens, _ones(columns, self.device), cache)
        cache_rows.repeat(cache, len(choices))
        return ReadPrompt(choices, cache, columns, logits[0])

    def join(self, read: ReadPrompt) -> Iterator[tuple[Choice, Tensor]]:
        """Adds choices as rows, after their prompt was read.

        Yields:
            Each choice with the logits after its prompt.
        """
        choices, cache, columns = read.choices, read.cache, read.columns
        if self._cache is None:
            self._cache, self._columns = cache, columns
            self._padding = [0] * len(choices)
        else:
            cache_rows.join(self._cache, cache, self._columns, columns)
            longest = max(self._columns, columns)
            self._padding = [each + longest - self._columns for each in self._padding]
            self._padding += [longest - columns] * len(choices)
            self._columns = longest
        self.rows += choices
        for choice in choices:
            yield choice, read.logits

    def step(self) -> Iterator[tuple[Choice, Tensor]]:
        """Reads the last token of every row.

        Yields:
            Each row with the logits of its next token.
        """
        tokens = torch.tensor([[row.made[-1]] for row in self.rows], device=self.device)
        self._columns += 1
        places = torch.arange(self._columns, device=self.device)
        mask = (places >= torch.tensor(self._padding, device=self.device)[:, None]).long()
        logits, self._cache = self._forward(tokens, mask, self._cache)
        yield from zip(list(self.rows), logits, strict=True)

    def leave(self, ended: Sequence[Choice]) -> None:
        """Removes rows."""
        kept = [number for number, row in enumerate(self.rows) if row not in ended]
        if len(kept) == len(self.rows):
            return
        if not kept:
            self.rows, self._cache, self._columns, self._padding = [], None, 0, []
            return
        unneeded = min(self._padding[number] for number in kept)
        cache_rows.keep(self._cache, kept, self._columns, unneeded)
        self.rows = [self.rows[number] for number in kept]
        self._padding = [self._padding[number] - unneeded for number in kept]
        self._columns -= unneeded


def _ones(columns: int, device: torch.device) -> Tensor:
    return torch.ones(1, columns, dtype=torch.long, device=device)
