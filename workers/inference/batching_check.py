"""Checks that a model computes rows of one cache as it computes each sequence alone.

Families differ in how they treat padding, positions and caches. This is therefore tested with a few
tokens before a model answers; a model that fails the test answers one sequence at a time.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from workers.inference import cache_rows
from workers.inference.batch import Batch, Forward
from workers.inference.choice import Choice
from workers.inference.sampling import Sampling
from workers.inference.text_stream import TextStream

_LENGTHS = (5, 19, 11)
_STEPS = 3
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}
"""The largest relative difference of logits, by the precision of the weights."""

_GREEDY = Sampling(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, {})


@dataclass(frozen=True)
class BatchingSupport:
    """What was found out about a model."""

    agree: bool
    bytes_per_token: float
    """The memory that a cache takes for one token of one row."""


def check_batching(model: Any, device: torch.device) -> BatchingSupport:
    """Lets sequences join and leave, and compares their logits with those of the whole sequences without a
    cache."""
    try:
        with torch.inference_mode():
            return _tried(model, device)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # any error of a family that expects something else
        return BatchingSupport(agree=False, bytes_per_token=0.0)


def _tried(model: Any, device: torch.device) -> BatchingSupport:
    if _depends_on_longest(model):
        return BatchingSupport(agree=False, bytes_per_token=0.0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    source = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary, (length,), generator=source).tolist() for length in _LENGTHS]
    choices = [_choice(prompt) for prompt in prompts]
    batch = Batch(model, device)
    worst, size = 0.0, 0.0
    for choice in choices[:2]:
        worst = max(worst, *(_take(model, device, *each) for each in batch.join(batch.read([choice]))))
    if not cache_rows.can_be_joined(batch.cache):
        return BatchingSupport(agree=False, bytes_per_token=0.0)
    size = cache_rows.bytes_per_token(batch.cache)
    for number in range(_STEPS):
        if number == 1:
            joined = batch.join(batch.read([choices[2]]))
            worst = max(worst, *(_take(model, device, *each) for each in joined))
        if number == 2:
            batch.leave([choices[1]])
        worst = max(worst, *(_take(model, device, *each) for each in batch.step()))
    dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
    return BatchingSupport(agree=worst <= _TOLERANCE.get(dtype, 6e-2), bytes_per_token=size)


def _depends_on_longest(model: Any) -> bool:
    """Whether positions are scaled by the longest row, so that a row depends on the others."""
    kinds = (getattr(module, "rope_type", None) for module in model.modules())
    named = [each for kind in kinds for each in (kind.values() if isinstance(kind, dict) else [kind])]
    return not {"dynamic", "longrope"}.isdisjoint(filter(None, named))


def _choice(prompt: list[int]) -> Choice:
    return Choice(
        request_id="",
        index=0,
        prompt=prompt,
        max_tokens=2 * _STEPS,
        ends=(),
        sampling=_GREEDY,
        text=TextStream(None),
        tokenizer=None,
        source=torch.Generator(),
    )


def _take(model: Any, device: torch.device, choice: Choice, logits: torch.Tensor) -> float:
    """Gives a sequence its next token. Returns the relative difference from the logits of the whole sequence;
    infinite if any is not a number."""
    whole = torch.tensor([choice.prompt + choice.made], device=device)
    expected, _ = Forward(model)(whole, torch.ones_like(whole), None)
    difference = float((logits - expected[0]).norm() / expected[0].norm().clamp(min=1e-12))
    choice.made.append(int(expected[0].argmax()))
    return difference if difference == difference else inf
