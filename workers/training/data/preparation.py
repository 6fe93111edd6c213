"""Training data: read line by line, tokenised once into an Arrow file, read from there by memory map."""

import hashlib
import itertools
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from app.contract.data_formats import (
    BadLine,
    ClassifiedText,
    Example,
    LabelledChat,
    LabelledCompletion,
    parse_line,
    unused_keys,
)
from app.contract.objective import ObjectiveSpec
from app.contract.spec import DataSpec, Shard
from workers.run_directory import sync, write_atomically
from workers.training.data.encoding import EncodedSequence, ExampleEncoder
from workers.training.exceptions import CannotTrain, Interrupted

Tokens = npt.NDArray[np.int32]
Counts = npt.NDArray[np.bool_]
Mask = npt.NDArray[np.bool_]
_CHUNK = 1000
_MAX_KEYS = 20
_OPTIONAL_FILES = ("labels.npy", "classes.npy")
_FILES = ("samples.arrow", "sizes.npy", "weights.npy", *_OPTIONAL_FILES)
_SCHEMA = pa.schema([("tokens", pa.list_(pa.int32())), ("counts", pa.list_(pa.uint8()))])
"""`counts` in bytes, not bits, so that it is read without a copy."""


@dataclass
class PreparationStatistics:
    """Statistics of the prepared data, counted in samples unless named otherwise."""

    samples: int = 0
    tokens: int = 0
    targets: int = 0
    longest: int = 0
    truncated: int = 0
    """Sequences; a pair has two."""
    split: int = 0
    """Sequences."""
    last_answers_only: int = 0
    """Chats of which only the last answer is learned."""
    without_targets: int = 0
    without_weight: int = 0
    equal_answers: int = 0
    """Pairs whose answers are the same, perhaps because both were cut."""
    without_mismatch: int = 0
    """KTO's samples that could not be paired with an answer to another prompt."""
    without_tool_calls: int = 0
    """Chats whose tool calls the chat template leaves out."""
    unused_keys: list[str] = field(default_factory=list)
    """The first unknown keys that were found in the lines."""

    def note_unused(self, example: Example) -> None:
        new = unused_keys(example).difference(self.unused_keys)
        self.unused_keys += sorted(new)[: _MAX_KEYS - len(self.unused_keys)]

    def notes(self, max_length: int) -> list[str]:
        """How many sequences were cut or split, how many samples have no target, and which keys were
        ignored."""
        counted = (
            (self.truncated, f"cut to max_length {max_length}"),
            (self.split, "split into parts"),
            (
                self.last_answers_only,
                "chats of which only the last answer is learned, because the model's chat template renders "
                "an answer differently once other messages follow",
            ),
            (self.without_targets, "without a token that counts toward the loss"),
            (self.equal_answers, "pairs whose chosen and rejected answers are the same within max_length"),
            (
                self.without_mismatch,
                "that could not be paired with an answer to another prompt, so that KTO's divergence is not "
                "estimated on them",
            ),
            (
                self.without_tool_calls,
                "chats whose tool calls are lost, because the model's chat template does not render them",
            ),
        )
        notes = [f"{count} {what}" for count, what in counted if count]
        if self.unused_keys:
            notes.append(f"unknown keys, ignored: {', '.join(map(ascii, self.unused_keys))}")
        return notes


class Samples:
    """The tokenised samples: lengths in memory, tokens on disk.

    A sample is one sequence of tokens, or two: those of a pair's chosen and rejected answer; or, for KTO, its
    own and its mismatch (its prompt with the completion of another sample), which trains nothing.

    These attributes have the shape (samples,):

    - `tokens` (int64): the tokens of the trained sequences.
    - `lengths` (int64): the padded length by which windows are cut: the number of trained sequences times the
      longest stored one (for KTO, the mismatch counts among the stored ones).
    - `targets` (int64): the tokens of the trained sequences that count for the loss; 0 if either answer of a
      pair has none, and 1 for a text with a class.
    - `weights` (fp32): the weight of each target token or, with a preference objective, of the sample.
    - `labels` (bool): for KTO, whether the completion is desirable; otherwise None.
    - `classes` (int64): the class of the text; None unless texts have classes.
    """

    def __init__(self, folder: Path) -> None:
        self._source = pa.memory_map(str(folder / "samples.arrow"))
        reader = pa.ipc.open_file(self._source)
        chunks = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._starts = np.cumsum([0] + [len(chunk) for chunk in chunks])
        self._offsets = [chunk.column("tokens").offsets.to_numpy() for chunk in chunks]
        self._tokens = [chunk.column("tokens").values.to_numpy() for chunk in chunks]
        self._counts = [chunk.column("counts").values.to_numpy().view(np.bool_) for chunk in chunks]
        self.weights: npt.NDArray[np.float32] = np.load(folder / "weights.npy")
        labels = folder / "labels.npy"
        self.labels: Mask | None = np.load(labels) if labels.exists() else None
        classes = folder / "classes.npy"
        self.classes: npt.NDArray[np.int64] | None = np.load(classes) if classes.exists() else None
        sizes: npt.NDArray[np.int64] = np.load(folder / "sizes.npy")
        self.stored_sequences = sizes.shape[1] // len(self.weights) if len(self.weights) else 1
        """The sequences that are stored of each sample."""
        self.sequences = 1 if self.labels is not None else self.stored_sequences
        """The sequences of each sample that are trained on."""
        own = sizes.reshape(2, -1, self.stored_sequences)
        self.sequence_lengths: npt.NDArray[np.int64] = own[0]
        """Tokens of each stored sequence, of shape (samples, stored sequences)."""
        self.tokens: npt.NDArray[np.int64] = own[0, :, : self.sequences].sum(-1)
        self.lengths: npt.NDArray[np.int64] = own[0].max(-1, initial=0) * self.sequences
        self.sequence_targets: npt.NDArray[np.int64] = own[1]
        """Target tokens of each stored sequence, of the same shape."""
        trained = own[1, :, : self.sequences]
        self.targets: npt.NDArray[np.int64] = np.where((trained > 0).all(-1), trained.sum(-1), 0)
        self.objective: ObjectiveSpec | None = None
        """None: the loss is a sum over targets."""
        self.scores_sequences = False
        """Whether a score of each sequence is trained, instead of predictions of tokens."""
        self.reference: npt.NDArray[np.float64] = np.zeros((len(self), self.stored_sequences))
        """The log-probability of each stored sequence's targets under the model that the job starts from."""

    def __len__(self) -> int:
        return len(self.weights)

    def begin_objective(
        self, objective: ObjectiveSpec, reference: npt.NDArray[np.float64] | None = None
    ) -> None:
        """From now on, the loss is that of the objective: a sum over samples.

        Args:
            reference: log-probabilities of shape (samples, stored sequences), for objectives that compare.
        """
        self.scores_sequences = objective.scores_sequences
        if self.classes is None:  # otherwise each sample has one target, whose loss is summed as a token's
            self.objective = objective
        if reference is not None:
            self.reference = reference

    def read(self, sample: int, sequence: int = 0) -> tuple[Tokens, Counts]:
        """The tokens of a sample's sequence, and which of them count."""
        at = sample * self.stored_sequences + sequence
        chunk = int(np.searchsorted(self._starts, at, side="right")) - 1
        row = at - int(self._starts[chunk])
        start, stop = self._offsets[chunk][row : row + 2]
        return self._tokens[chunk][start:stop], self._counts[chunk][start:stop]

    def has_equal_answers(self, sample: int) -> bool:
        """Whether both answers of a pair are the same."""
        return bool(np.array_equal(self.read(sample, 0)[0], self.read(sample, 1)[0]))

    def largest_token(self) -> int:
        return max((int(each.max()) for each in self._tokens if len(each)), default=0)

    def denominator(self, samples: npt.NDArray[np.int64]) -> float:
        """What the summed loss of these samples is divided by: their target tokens, weighted; for a
        preference objective, the summed weights of the samples that have any."""
        counted = self.targets[samples]
        units = counted if self.objective is None else counted > 0
        return float(np.dot(self.weights[samples].astype(np.float64), units))

    def close(self) -> None:
        self._tokens, self._counts, self._offsets = [], [], []
        self._source.close()


def held_out(spec: DataSpec, seed: int) -> Mask:
    """A mask of the training file's examples that the seed selects for validation; all False if none are."""
    mask = np.zeros(spec.examples, dtype=np.bool_)
    order = np.random.Generator(np.random.PCG64([seed, spec.examples])).permutation(spec.examples)
    mask[order[: spec.held_out()]] = True
    return mask


def of_shard(shard: Shard, taken: Mask) -> Mask:
    """The examples of a shard among those that are taken; shards differ by at most one example."""
    mask = np.zeros_like(taken)
    mask[np.flatnonzero(taken)[shard.index :: shard.count]] = True
    return mask


def prepare(
    spec: DataSpec,
    source: Path,
    tokenizer: Any,
    folder: Path,
    taken: Mask | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> PreparationStatistics:
    """Tokenises the source into `folder`, unless an earlier attempt did so from the same content.

    Args:
        taken: which of the file's examples are used, bool of shape (examples,); None for all.
        interrupted: checked between chunks.
        report: called between chunks with the number of examples done, and of all.

    Raises:
        CannotTrain: a line is invalid or too long, or no token counts for the loss.
        Interrupted: an interruption was requested; the next attempt prepares the data again.
    """
    key = _key(spec, tokenizer, taken)
    done = folder / "prepared.json"
    earlier = _prepared_earlier(done, key)
    if earlier is not None:
        return earlier
    _check_content(spec, source)
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    for name in _OPTIONAL_FILES:
        (folder / name).unlink(missing_ok=True)
    prepared = _write(spec, source, tokenizer, folder, taken, interrupted, report)
    if prepared.targets == 0:
        raise CannotTrain("nothing_to_learn", _why_nothing_counts(prepared, spec.max_length))
    for file in folder.iterdir():
        sync(file)
    write_atomically(done, json.dumps({"key": key, "digests": _digests(folder), **asdict(prepared)}))
    return prepared


def _why_nothing_counts(prepared: PreparationStatistics, max_length: int) -> str:
    if prepared.samples and prepared.without_weight == prepared.samples:
        return f"the weight of all {prepared.samples} samples is 0, so that none counts toward the loss"
    return (
        f"none of the {prepared.samples} samples has a token that counts toward the loss within "
        f"max_length {max_length}: raise max_length, or shorten the prompts"
    )


def _prepared_earlier(done: Path, key: str) -> PreparationStatistics | None:
    """What an earlier attempt prepared, if all of its files are as they were written."""
    try:
        stored = json.loads(done.read_text())
        if stored.pop("key") == key and stored.pop("digests") == _digests(done.parent):
            return PreparationStatistics(**stored)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # missing, damaged, or of an earlier version: the data is prepared again
    return None


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each prepared file."""
    found = {}
    for name in _FILES:
        if name in _OPTIONAL_FILES and not (folder / name).exists():
            continue
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _check_content(spec: DataSpec, source: Path) -> None:
    """Checks that the file is the one that the job was submitted with.

    Raises:
        CannotTrain: its content has changed.
    """
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != spec.sha256:
        raise CannotTrain(
            "data_changed",
            f"the content of {spec.file_id} is no longer what was uploaded: upload it again, and submit a "
            "new job",
        )


def _key(spec: DataSpec, tokenizer: Any, taken: Mask | None) -> str:
    content = (
        spec.model_dump_json(),
        hashlib.sha256(taken.tobytes()).hexdigest() if taken is not None else None,
        tokenizer.get_vocab(),
        tokenizer.chat_template,
    )
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write(
    spec: DataSpec,
    source: Path,
    tokenizer: Any,
    folder: Path,
    taken: Mask | None,
    interrupted: Callable[[], bool],
    report: Callable[[int, int], None],
) -> PreparationStatistics:
    prepared = PreparationStatistics()
    lengths, targets, weights, labels, classes = array("q"), array("q"), array("f"), array("b"), array("q")
    place = {name: number for number, name in enumerate(spec.classes)}
    stored = 2 if spec.with_mismatches else spec.sequences_per_sample
    last: EncodedSequence | None = None
    done, total = 0, spec.examples if taken is None else int(taken.sum())
    examples = read_examples(spec, source, taken)
    with (
        ExampleEncoder(tokenizer, classifies=bool(spec.classes)) as encoder,
        pa.ipc.new_file(str(folder / "samples.arrow"), _SCHEMA) as writer,
    ):
        while chunk := list(itertools.islice(examples, _CHUNK)):
            if interrupted():
                raise Interrupted
            for _, example in chunk:
                prepared.note_unused(example)
            rows: list[EncodedSequence] = []
            for (_, example), (number, sequences) in zip(chunk, encoder.samples(chunk), strict=True):
                fitted = [fit_length(spec, number, *each, prepared) for each in sequences]
                rows += itertools.chain.from_iterable(fitted)
                prepared.equal_answers += have_equal_answers(fitted)
                samples = sum(map(len, fitted)) // len(sequences)
                weights.extend([float(np.float32(example.weight))] * samples)
                if isinstance(example, LabelledCompletion | LabelledChat):
                    labels.extend([example.label] * samples)
                elif place and isinstance(example, ClassifiedText):
                    if example.class_name not in place:
                        why = f"the label {example.class_name!r:.60} is none of the classes"
                        raise CannotTrain("bad_line", f"a line of the data: {why}")
                    classes.append(place[example.class_name])
            if spec.with_mismatches:
                rows, last = _with_mismatches(rows, last, spec.max_length), rows[-1]
                both = zip(rows[::2], rows[1::2], strict=True)
                prepared.without_mismatch += sum(any(own) and not any(other) for (_, own), (_, other) in both)
            writer.write_batch(_record(rows))
            lengths.extend(len(tokens) for tokens, _ in rows)
            targets.extend(int(any(counts) if place else sum(counts[1:])) for _, counts in rows)
            done += len(chunk)
            report(done, total)
    prepared.last_answers_only = encoder.last_answers_only
    prepared.without_tool_calls = encoder.without_tool_calls
    sizes = np.array([lengths, targets], dtype=np.int64).reshape(2, -1, stored)
    sizes[1, np.array(weights) == 0.0] = 0
    np.save(folder / "sizes.npy", sizes.reshape(2, -1))
    np.save(folder / "weights.npy", np.array(weights, dtype=np.float32))
    if spec.with_mismatches:
        np.save(folder / "labels.npy", np.array(labels, dtype=np.bool_))
    if place:
        np.save(folder / "classes.npy", np.array(classes, dtype=np.int64))
    own = sizes[:, :, : spec.sequences_per_sample]
    counted = np.where((own[1] > 0).all(-1), own[1].sum(-1), 0)
    prepared.samples, prepared.tokens, prepared.targets = len(weights), int(own[0].sum()), int(counted.sum())
    prepared.longest = int(own[0].max(initial=0))
    prepared.without_targets = int((counted == 0).sum())
    prepared.without_weight = weights.count(0)
    return prepared


def have_equal_answers(fitted: list[list[EncodedSequence]]) -> bool:
    """Whether a sample's two answers are the same once they were cut."""
    return len(fitted) == 2 and [tokens for tokens, _ in fitted[0]] == [tokens for tokens, _ in fitted[1]]


def _with_mismatches(
    rows: list[EncodedSequence], before: EncodedSequence | None, max_length: int
) -> list[EncodedSequence]:
    """Each sequence, followed by its mismatch: its prompt with the completion of the nearest sequence before
    it that has another prompt (for the first of `rows`, from their end), cut to `max_length`. Without any
    such sequence, no token of the mismatch counts.

    Args:
        before: the last sequence of earlier rows, used if all of `rows` have the same prompt.
    """
    starts = [_first_counted(counts) for _, counts in rows]
    prompts = [tuple(tokens[:start]) for (tokens, _), start in zip(rows, starts, strict=True)]
    nearest: list[int | None] = [None] * len(rows)
    for _ in range(2):  # the second time around, the first rows find those at the end
        for number in range(len(rows)):
            differs = prompts[number - 1] != prompts[number]
            nearest[number] = number - 1 if differs else nearest[number - 1]
    found = []
    for (tokens, counts), start, prompt, place in zip(rows, starts, prompts, nearest, strict=True):
        other = before if place is None else rows[place]
        if other is None or ((end := _first_counted(other[1])) == start and tuple(other[0][:end]) == prompt):
            found += [(tokens, counts), (tokens, [False] * len(counts))]
            continue
        mismatch = (tokens[:start] + other[0][end:], counts[:start] + other[1][end:])
        found += [(tokens, counts), (mismatch[0][:max_length], mismatch[1][:max_length])]
    return found


def _first_counted(counts: list[bool]) -> int:
    """The place of the first token that counts; the end if none does."""
    return next((at for at, counted in enumerate(counts) if counted), len(counts))


def _record(rows: list[EncodedSequence]) -> pa.RecordBatch:
    columns = (
        [np.asarray(tokens, np.int32) for tokens, _ in rows],
        [np.asarray(counts, np.uint8) for _, counts in rows],
    )
    arrays = [pa.array(column, item.type) for column, item in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=_SCHEMA)


def read_examples(
    spec: DataSpec, source: Path, taken: Iterable[object] | None = None
) -> Iterator[tuple[int, Example]]:
    """The examples of a JSONL file with their line numbers, from 1; blank lines are skipped.

    Args:
        taken: for each example, whether it is read; None reads all.

    Raises:
        CannotTrain: a line is not an example of the format.
    """
    with source.open("rb") as lines:
        examples: Iterable[tuple[int, bytes]] = (
            (number, line) for number, line in enumerate(lines, start=1) if line.strip()
        )
        if taken is not None:
            examples = itertools.compress(examples, taken)
        for number, line in examples:
            try:
                yield number, parse_line(line, spec.format)[1]
            except BadLine as error:
                raise CannotTrain("bad_line", f"line {number} of the data: {error}") from None


def fit_length(
    spec: DataSpec, number: int, tokens: list[int], counts: list[bool], prepared: PreparationStatistics
) -> list[EncodedSequence]:
    """What a sequence becomes: itself, its beginning, or its parts.

    Raises:
        CannotTrain: it is longer than `max_length` and the spec says that this is an error.
    """
    longest = spec.max_length
    if len(tokens) <= longest:
        return [(tokens, counts)]
    if spec.overlength == "error":
        whole = spec.sequences_per_sample > 1 or spec.with_mismatches or spec.classes
        raise CannotTrain(
            "overlength",
            f"line {number} of the data has {len(tokens)} tokens, more than max_length {longest}: "
            f"raise max_length, or set overlength to truncate{'' if whole else ' or split'}",
        )
    if spec.overlength == "truncate":
        prepared.truncated += 1
        return [(tokens[:longest], counts[:longest])]
    prepared.split += 1
    parts = range(0, len(tokens), longest)
    return [(tokens[i : i + longest], counts[i : i + longest]) for i in parts if len(tokens) - i > 1]
