"""Compares an export with the trained model: the same tokens, and the same most probable next token after
every prefix of the answers in held-out samples; or the same class of each, or the same order of each pair."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.contract.data_formats import Example
from app.contract.export import (
    LEAST_AGREEMENT,
    LEAST_AGREEMENT_QUANTISED,
    NEAR_TIE_NATS,
    ExportOrder,
    Verification,
)
from workers.exports.refusal import NotExported
from workers.training.data.encoding import EncodedSequence, ExampleEncoder
from workers.training.data.preparation import held_out, read_examples
from workers.training.exceptions import CannotTrain
from workers.training.losses.loss import takes
from workers.training.models.score_head import score_layer_of

MOST_SAMPLES = 64
MOST_TOKENS = 8192
"""The maximum number of tokens that are computed, over all samples."""
_CANDIDATES = 16
"""The most probable tokens whose log-probabilities are kept."""


@dataclass(frozen=True)
class Sample:
    """A sample to compare on."""

    example: Example
    sequence: EncodedSequence
    """By the trained model's tokenizer and template; of a pair, the chosen answer."""
    held_out: bool
    max_length: int
    """As in training: the tokens of the sample that are computed."""
    rejected: EncodedSequence | None = None
    """The other answer of a pair."""

    @property
    def tokens(self) -> list[int]:
        return self.sequence[0][: self.max_length]

    @property
    def counts(self) -> list[bool]:
        """Whether each token but the first is predicted."""
        return self.sequence[1][1 : self.max_length]


@dataclass(frozen=True)
class Predictions:
    """The most probable next tokens, most probable first: of shape (positions, candidates). Of a classifier,
    the most probable classes of each sample; of a reward model, the preferred answer of each pair (0: the
    chosen one)."""

    tokens: Tensor
    log_probs: Tensor


def samples_of(order: ExportOrder, source: Path, tokenizer: Any) -> list[Sample]:
    """Samples of the job's data: those that were held out, or if none were, the first ones.

    Raises:
        NotExported: the file has been deleted, or no sample can be compared.
        CannotTrain: a line cannot be read.
    """
    data = order.data
    is_own_file = data.validation is not None and data.validation.file_id is not None
    mask = held_out(data, order.seed) if data.held_out() else None
    try:
        examples = list(itertools.islice(read_examples(data, source, mask), MOST_SAMPLES))
    except OSError:
        raise NotExported(
            "the file with the job's data has been deleted, so that the export cannot be compared with the "
            "model",
        ) from None
    with ExampleEncoder(tokenizer, classifies=bool(data.classes)) as encoder:
        encoded = [sequences for _, sequences in encoder.samples(examples)]
    found: list[Sample] = []
    tokens = 0
    for (_, example), sequences in zip(examples, encoded, strict=True):
        rejected = sequences[1] if len(sequences) > 1 else None
        sample = Sample(example, sequences[0], mask is not None or is_own_file, data.max_length, rejected)
        if tokens + len(sample.tokens) > MOST_TOKENS and found:
            break
        if any(sample.counts) or data.classes:
            found.append(sample)
            tokens += len(sample.tokens)
    if not found:
        raise NotExported(
            "no sample has a token that counts within max_length, so that there is nothing to compare"
        )
    return found


def check_tokenizer(tokenizer: Any, samples: list[Sample], order: ExportOrder) -> None:
    """Checks that an export's tokenizer and chat template give the same tokens.

    Raises:
        NotExported: they do not.
    """
    numbered = [(number, sample.example) for number, sample in enumerate(samples, start=1)]
    try:
        with ExampleEncoder(tokenizer, classifies=bool(order.data.classes)) as encoder:
            own = [sequences[0] for _, sequences in encoder.samples(numbered)]
    except CannotTrain as error:
        raise NotExported(
            f"the exported tokenizer or chat template cannot read the samples: {error}"
        ) from None
    different = sum(found != sample.sequence for found, sample in zip(own, samples, strict=True))
    if different:
        raise NotExported(
            f"the exported tokenizer or chat template gives other tokens for {different} of {len(samples)} "
            "samples",
        )


def predictions(model: Any, samples: list[Sample]) -> Predictions:
    """What a model predicts at each position whose next token counts, or of a whole sample if it scores
    sequences; each sample is computed alone."""
    model.eval()
    options = {"use_cache": False} if takes(model, "use_cache") else {}
    if score_layer_of(model) is not None:
        return _by_scores(model, samples, options)
    tokens, log_probs = [], []
    with torch.no_grad():
        for sample in samples:
            given = torch.tensor([sample.tokens])
            logits = model(input_ids=given, **options).logits[0, :-1][torch.tensor(sample.counts)].float()
            best = logits.log_softmax(-1).topk(min(_CANDIDATES, logits.shape[-1]))
            tokens.append(best.indices)
            log_probs.append(best.values)
    return Predictions(torch.cat(tokens), torch.cat(log_probs))


def _by_scores(model: Any, samples: list[Sample], options: dict[str, Any]) -> Predictions:
    """What a model that scores whole sequences predicts of each sample: its class, or which answer of a pair
    is preferred, with the probabilities of Bradley and Terry."""

    def scores(tokens: list[int]) -> Tensor:
        found: Tensor = model(input_ids=torch.tensor([tokens]), **options).logits[0].double()
        return found

    def of_sample(sample: Sample) -> Tensor:
        if sample.rejected is None:
            return scores(sample.tokens)
        return torch.cat([scores(sample.tokens), scores(sample.rejected[0][: sample.max_length])])

    with torch.no_grad():
        each = torch.stack([of_sample(sample) for sample in samples]).log_softmax(-1)
    best = each.topk(min(_CANDIDATES, each.shape[1]))
    return Predictions(best.indices, best.values)


def compared(
    expected: Predictions, found: Predictions, samples: list[Sample], *, quantised: bool = False
) -> Verification:
    """The comparison of an export's predictions with those of the trained model."""
    own, first = found.tokens[:, 0], expected.tokens[:, 0]
    same = own == first
    is_candidate = expected.tokens == own.unsqueeze(1)
    log_prob = torch.where(is_candidate, expected.log_probs, -torch.inf).amax(1)
    near = ~same & (expected.log_probs[:, 0] - log_prob < NEAR_TIE_NATS)
    count = max(1, len(same))
    return Verification(
        samples=len(samples),
        held_out=all(sample.held_out for sample in samples),
        tokens=len(same),
        agreement=int(same.sum()) / count,
        near_ties=int(near.sum()) / count,
        least=LEAST_AGREEMENT_QUANTISED if quantised else LEAST_AGREEMENT,
    )


def why_not_valid(verification: Verification, remedy: str, *, scores: bool = False) -> str:
    """Why an export is not handed out, and what to do."""
    differing = 1 - verification.agreement - verification.near_ties
    if scores:
        return (
            f"the export does not agree with the trained model: for {differing:.2%} of "
            f"{verification.samples} samples, it gives another class, or prefers the other answer of a pair: "
            f"{remedy}"
        )
    return (
        f"the export does not agree with the trained model: in {differing:.2%} of {verification.tokens:,} "
        f"predictions on {verification.samples} samples, its most probable token is another one, although "
        f"the trained model clearly prefers its own: {remedy}"
    )
