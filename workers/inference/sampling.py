"""Chooses the next token of one sequence from the model's logits."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.contract.inference import SamplingOptions

_GREEDY_BELOW = 1e-5
"""Temperatures below this choose the most probable token."""


@dataclass(frozen=True)
class Sampling:
    """The options of a sequence, with the model's defaults filled in.

    The order is that of transformers: penalties and biases, temperature, then the limits on which tokens can
    be chosen.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    _tensors: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)
    """Tensors that are the same for each token."""

    @property
    def is_plain(self) -> bool:
        """Whether the model's most probable token is chosen, without penalties and biases."""
        return self.temperature < _GREEDY_BELOW and not self._changes_logits()

    def _changes_logits(self) -> bool:
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
        )

    def choose(self, logits: Tensor, prompt: list[int], made: list[int], source: torch.Generator) -> int:
        """The next token.

        Args:
            logits: those of one position, in fp32; of shape [vocabulary].
            prompt: the tokens of the prompt.
            made: the tokens of the answer so far.
            source: where random numbers come from.
        """
        if self._changes_logits():
            logits = self._changed(logits.clone(), prompt, made)
        if self.temperature < _GREEDY_BELOW:
            return int(logits.argmax())
        probabilities = torch.softmax(self._limited(_finite(logits / self.temperature)), dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=source))

    def _changed(self, logits: Tensor, prompt: list[int], made: list[int]) -> Tensor:
        if self.repetition_penalty != 1.0:  # Keskar et al. 2019
            of_prompt = self._kept(id(prompt), lambda: torch.tensor(prompt, device=logits.device))
            seen = torch.cat([of_prompt.long(), torch.tensor(made, dtype=torch.long, device=logits.device)])
            own = logits[seen]
            logits[seen] = torch.where(own < 0, own * self.repetition_penalty, own / self.repetition_penalty)
        if made and (self.presence_penalty or self.frequency_penalty):  # as in OpenAI's API: of the answer
            tokens, counts = torch.tensor(made, device=logits.device).unique(return_counts=True)
            logits[tokens] -= self.presence_penalty + self.frequency_penalty * counts
        if self.logit_bias:
            biases = {token: bias for token, bias in self.logit_bias.items() if token < len(logits)}
            tokens = self._kept("tokens", lambda: torch.tensor(list(biases), device=logits.device).long())
            values = self._kept("biases", lambda: torch.tensor(list(biases.values()), device=logits.device))
            logits[tokens] += values
        return logits

    def _kept(self, name: Any, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = make()
        return self._tensors[name]

    def _limited(self, logits: Tensor) -> Tensor:
        """The logits without the tokens that top_k, top_p and min_p exclude; one token always stays."""
        if 0 < self.top_k < len(logits):
            least = torch.topk(logits, self.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1.0:
            ordered, tokens = logits.sort(descending=True)
            shares = torch.softmax(ordered, dim=-1)
            outside = shares.cumsum(dim=-1) - shares >= self.top_p
            outside[0] = False
            logits = logits.masked_fill(torch.zeros_like(outside).scatter(0, tokens, outside), -torch.inf)
        if self.min_p > 0.0:
            logits = logits.masked_fill(logits < logits.max() + log(self.min_p), -torch.inf)
        return logits


def _finite(logits: Tensor) -> Tensor:
    """Logits without infinite values, of which no probabilities can be computed: extreme options make them,
    such as a tiny temperature or repetition penalty."""
    most = torch.finfo(logits.dtype).max
    return logits.nan_to_num(nan=-most, posinf=most, neginf=-most)


_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """What a model's generation_config.json says; absent values have no effect."""

    values: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path) -> "SamplingDefaults":
        """Those of a staged model's folder."""
        try:
            content = json.loads((folder / "generation_config.json").read_bytes())
        except (OSError, ValueError):
            return cls()
        return cls(
            {
                name: float(value)
                for name in _DEFAULTED
                if isinstance(value := content.get(name), int | float) and isfinite(value)
            }
        )

    def sampling(self, given: SamplingOptions) -> Sampling:
        """The options of a request, with the defaults for those that it does not give."""

        def chosen(name: str, without: float) -> float:
            own = getattr(given, name)
            return float(own if own is not None else self.values.get(name, without))

        return Sampling(
            temperature=max(0.0, chosen("temperature", 1.0)),
            top_p=chosen("top_p", 1.0),
            top_k=int(chosen("top_k", 0)),
            min_p=min(1.0, chosen("min_p", 0.0)),
            repetition_penalty=chosen("repetition_penalty", 1.0) or 1.0,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
            logit_bias=given.logit_bias,
        )
