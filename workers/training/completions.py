"""How the model completes held-out prompts, before and after training.

Greedy decoding: nothing is drawn at random, so that what is trained is what it would be without.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from app.contract.reports import Completion, Completions
from workers.training.data import Samples
from workers.training.start import Training

MOST_TOKENS = 48
"""The most tokens of a completion."""

_PROMPT_TOKENS = 256
"""The last ones of a prompt."""

_SECONDS = 20.0
"""For each completion; what is there by then is taken."""


@dataclass(frozen=True)
class Prompt:
    """A held-out sample, cut where the model is to continue."""

    tokens: list[int]
    expected: list[int]


def before(training: Training) -> None:
    """Completes prompts with the base model; a run that resumes has done so already."""
    if training.state.step == 0:
        _note(training, "before")


def after(training: Training) -> None:
    """Asks the model that is about to be saved."""
    _note(training, "after")


def prompts(samples: Samples, count: int) -> list[Prompt]:
    """At most so many, evenly spread over the samples that have something to learn."""
    chosen = np.flatnonzero(samples.targets)
    if len(chosen) > count:
        chosen = chosen[np.linspace(0, len(chosen) - 1, count).astype(np.int64)]
    return [cut for sample in chosen[:count].tolist() if (cut := _cut(*samples.read(sample))) is not None]


def _cut(tokens: Any, counts: Any) -> Prompt | None:
    """Before the first token that counts; in the middle where all of them do."""
    first = int(np.argmax(counts))
    at = first if first > 0 else len(tokens) // 2
    if at == 0:
        return None
    return Prompt(tokens[max(0, at - _PROMPT_TOKENS) : at].tolist(), tokens[at : at + MOST_TOKENS].tolist())


def _note(training: Training, when: str) -> None:
    count = training.assignment.spec.completions
    if count == 0 or training.loader.validation is None:
        return
    requested = prompts(training.loader.validation, count)
    try:
        made = [_complete(training, prompt.tokens) for prompt in requested]
    except Exception as error:  # whatever a model may not like: nothing is lost but something to look at
        why = f"Held-out prompts were not completed: {type(error).__name__}."
        training.reporter.event("completions", why, "warning")
        return
    known = training.run.completions()
    if known is None or len(known.data) != len(requested):
        known = Completions(data=tuple(_unanswered(training.tokenizer, prompt) for prompt in requested))
    answered = zip(known.data, made, strict=True)
    data = tuple(each.model_copy(update={when: text}) for each, text in answered)
    training.run.write_completions(Completions(data=data))


def _unanswered(tokenizer: Any, prompt: Prompt) -> Completion:
    return Completion(prompt=_text(tokenizer, prompt.tokens), expected=_text(tokenizer, prompt.expected))


def _complete(training: Training, tokens: list[int]) -> str:
    from transformers import GenerationConfig

    model, tokenizer = training.replica.model, training.tokenizer
    own = GenerationConfig(
        max_new_tokens=MOST_TOKENS,
        max_time=_SECONDS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=training.loader.form.pad_id,
    )
    given = torch.tensor([tokens], device=training.replica.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), training.replica.autocast():
            made = model.generate(
                input_ids=given, attention_mask=torch.ones_like(given), generation_config=own
            )
    finally:
        model.train(was_training)
    return _text(tokenizer, made[0, len(tokens) :].tolist())


def _text(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
