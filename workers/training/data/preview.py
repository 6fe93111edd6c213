"""A dataset as the trainer will see it: the first samples token by token, and the lengths."""

import hashlib
from collections.abc import Iterator
from heapq import nlargest
from itertools import compress, count, islice, repeat
from math import ceil, log10
from pathlib import Path
from typing import Any, Literal

import numpy as np

from app.contract.data_formats import Example
from app.contract.preview import DatasetPreview, LengthBin, Lengths, PreviewedSample, PreviewSpec
from app.contract.spec import DataSpec
from workers.training.data.encoding import EncodedSequence, ExampleEncoder
from workers.training.data.preparation import (
    PreparationStatistics,
    fit_length,
    have_equal_answers,
    read_examples,
)
from workers.training.exceptions import CannotTrain

MAX_EXAMPLES = 1000
"""The maximum number of examples that are measured; in a larger file, they are spread evenly."""

LONGEST = 50
"""How many of a larger file's longest lines are measured as well, so that the longest sample is known even if
it is not among those spread evenly."""

_BINS = 20
_PAIR: tuple[Literal["chosen", "rejected"], ...] = ("chosen", "rejected")
_CHUNK = 100


def preview(order: PreviewSpec, source: Path, tokenizer: Any) -> DatasetPreview:
    """Reads a part of a file in the same way as `workers.training.data.preparation.prepare` reads all of it.

    Raises:
        CannotTrain: the file cannot be read, and the trainer could not read it either.
    """
    with ExampleEncoder(tokenizer, classifies=bool(order.data.classes)) as encoder:
        return _previewed(order, source, tokenizer, encoder)


def _previewed(order: PreviewSpec, source: Path, tokenizer: Any, encoder: ExampleEncoder) -> DatasetPreview:
    data = order.data
    paired = data.format == "preference"
    samples: list[PreviewedSample] = []
    whole: list[int] = []
    kept: list[int] = []
    targets: list[int] = []
    longest, measured = 0, _measured(data)
    equal_answers, statistics = 0, PreparationStatistics()
    for place, example, (number, sequences) in _samples(order, source, encoder, measured):
        rows = []
        for tokens, counts in sequences:
            longest = max(longest, len(tokens))
            try:
                rows += fit_length(data, number, tokens, counts, statistics)
            except CannotTrain:
                rows = []  # too long, and refused: counted below
                break
        if example.weight == 0:
            rows = [(tokens, [False] * len(tokens)) for tokens, _ in rows]
        if place < order.shown:
            answers = _PAIR if paired else repeat(None)
            if data.classes:  # the class is predicted at the last token
                rows = [(tokens, [False] * (len(tokens) - 1) + [any(counts)]) for tokens, counts in rows]
            samples += [
                _sample(number, answer, *row, tokenizer, classifies=bool(data.classes))
                for answer, row in zip(answers, rows, strict=False)
            ]
        if place in measured:
            statistics.note_unused(example)
            equal_answers += paired and have_equal_answers([[row] for row in rows])
            counted = [int(any(own)) if data.classes else sum(own[1:]) for _, own in rows]
            whole.append(max(len(tokens) for tokens, _ in sequences))
            kept.append(sum(len(own) for own, _ in rows))
            targets.append(sum(counted) if len(sequences) == 1 or all(counted) else 0)
    return DatasetPreview(
        file_id=data.file_id,
        model_name=order.model.name,
        format=data.format,
        examples=data.examples,
        max_length=data.max_length,
        overlength=data.overlength,
        samples=tuple(samples[: order.shown * (2 if paired else 1)]),
        lengths=_lengths(
            np.array(whole), np.array(kept), np.array(targets), longest, data.max_length
        ).model_copy(
            update={
                "equal_answers": equal_answers,
                "without_tool_calls": encoder.without_tool_calls,
                "unused_keys": tuple(statistics.unused_keys),
            }
        ),
    )


def _samples(
    order: PreviewSpec, source: Path, encoder: ExampleEncoder, measured: set[int]
) -> Iterator[tuple[int, Example, tuple[int, list[EncodedSequence]]]]:
    """For each example that is read: its index, itself, its line number, and its sequences."""
    places = range(order.data.examples)
    longest = _longest(source) if len(measured) < len(places) else set()
    taken = [place < order.shown or place in measured or place in longest for place in places]
    examples = read_examples(order.data, source, taken)
    read = compress(places, taken)
    while chunk := list(islice(examples, _CHUNK)):
        for (_, example), encoded in zip(chunk, encoder.samples(chunk), strict=True):
            yield next(read), example, encoded


def _longest(source: Path) -> set[int]:
    """The examples whose lines are longest."""
    with source.open("rb") as file:
        sizes = (len(line) for line in file if line.strip())
        return {place for _, place in nlargest(LONGEST, zip(sizes, count(), strict=False))}


def _measured(data: DataSpec) -> set[int]:
    """The examples that are measured: one out of every few, chosen by the file's digest instead of at fixed
    intervals, since a file may have a repeating pattern."""
    every = max(1, ceil(data.examples / MAX_EXAMPLES))
    seed = int.from_bytes(hashlib.sha256(data.sha256.encode()).digest()[:8])
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(every, size=ceil(data.examples / every))
    return {
        place for number, own in enumerate(drawn.tolist()) if (place := number * every + own) < data.examples
    }


def _sample(
    line: int,
    answer: Literal["chosen", "rejected"] | None,
    tokens: list[int],
    counts: list[bool],
    tokenizer: Any,
    *,
    classifies: bool,
) -> PreviewedSample:
    return PreviewedSample(
        line=line,
        answer=answer,
        tokens=_texts(tokens, tokenizer),
        token_ids=tuple(tokens),
        counts=tuple(counts),
        target_tokens=sum(counts if classifies else counts[1:]),
    )


def _texts(tokens: list[int], tokenizer: Any) -> tuple[str, ...]:
    """Each token's part of the text: what decoding with the token adds to decoding without it.

    Tokens are not decoded alone: a part of a character gives nothing, and some tokenizers drop the space
    before a word.
    """
    texts: list[str] = []
    start, decoded = 0, 0
    for end in range(1, len(tokens) + 1):
        before = tokenizer.decode(tokens[start:decoded])
        text = tokenizer.decode(tokens[start:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the rest of the character is still to come
            texts.append("")
            continue
        texts.append(text[len(before) :])
        start, decoded = decoded, end
    return tuple(texts)


def _lengths(whole: Any, kept: Any, targets: Any, longest: int, max_length: int) -> Lengths:
    return Lengths(
        examples=len(whole),
        shortest=int(whole.min()),
        median=float(np.median(whole)),
        mean=float(whole.mean()),
        longest=longest,
        over_max_length=int((whole > max_length).sum()),
        without_targets=int((targets == 0).sum()),
        kept=float(kept.mean()),
        target_share=float(targets.sum() / max(1, kept.sum())),
        histogram=_histogram(whole),
    )


def _histogram(lengths: Any) -> tuple[LengthBin, ...]:
    """Bins of 1, 2 or 5 times a power of ten, at most twenty, from the first to the last non-empty one."""
    width = _round_up((int(lengths.max()) + 1) / _BINS)
    counted = np.bincount(lengths // width)
    return tuple(
        LengthBin(at_least=place * width, below=(place + 1) * width, examples=int(counted[place]))
        for place in range(int(lengths.min()) // width, len(counted))
    )


def _round_up(width: float) -> int:
    power = int(10 ** int(log10(max(1.0, width))))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= width)
