"""Answers requests with one model: chooses which are computed together, and reports what they add."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from app.contract.inference import AnswerPart, ChoiceDelta, InferenceError, InferenceOrder, Usage
from app.contract.model_reference import ModelLayer
from workers.inference import batching_check, one_at_a_time
from workers.inference.answer_parts import merged_parts
from workers.inference.answer_queue import AnswerQueue
from workers.inference.batch import Batch
from workers.inference.choice import Choice
from workers.inference.loading import Loaded, NotShared
from workers.inference.prompts import PromptReader
from workers.inference.protocol import AnswerOrder, Reported
from workers.inference.refusal import Refused, refused, unavailable
from workers.inference.text_stream import TextStream
from workers.training.devices.host_memory import available_on_host
from workers.training.exceptions import CannotTrain

Report = Callable[[Reported], None]

MAX_ROWS = 64
"""The maximum number of choices that are computed together."""

_REPORT_SECONDS = 0.02
"""How often what was added to answers is reported."""

_MAX_UNREPORTED = 256
"""How many deltas of an answer that is not streamed are collected before they are reported: a line must not
become too long."""

_MOST_ECHOED = 2**22
"""How many characters of prompts an answer may repeat: they are reported in one line, and stored in one
row of the database."""

_PREPARE_SECONDS = 0.02
"""For how long requests are prepared between two steps. Rendering and tokenising a request may take longer;
then the engine works on answers in progress for as long before it prepares the next request."""

_CACHE_SHARE = 0.5
"""The share of the memory that is free after loading that caches may take."""


@dataclass
class _Request:
    """A request that is being answered."""

    key_id: str | None
    choices: list[Choice]
    prompt_tokens: int
    streams: bool


class Engine:
    """Answers requests with a loaded model."""

    def __init__(self, loaded: Loaded, lines: "SimpleQueue[bytes | None]", report: Report) -> None:
        """
        Args:
            lines: orders, as lines of JSON; None at their end.
            report: sends what the engine reports.
        """
        self._loaded, self._lines, self._report = loaded, lines, report
        self._reader = PromptReader(loaded.tokenizer, loaded.context, loaded.vocabulary)
        self._orders = AnswerQueue()
        self._prepare_at = 0.0
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[tuple[str | None, list[Choice]]] = deque()
        """Choices of one prompt each, with their adapters."""
        self._batches: list[tuple[str | None, Batch]] = []
        rows = batching_check.check_batching(loaded.model, loaded.device)
        self._together = rows.agree
        free = _free_bytes(loaded.device)
        size = max(1.0, rows.bytes_per_token)
        self._tokens_at_most = int(min(_CACHE_SHARE * free / size, 2**31))
        self._ended = False
        self._unreported: dict[str, list[ChoiceDelta]] = {}
        self._report_at = 0.0

    def run(self) -> None:
        """Runs until the input ends."""
        self._report(Reported(ready=True))
        with torch.inference_mode():
            while not self._ended:
                self._read_orders(waits=not (self._orders or self._waiting or self._batches))
                self._prepare_orders(is_answering=bool(self._batches))
                self._guarded(self._begin_waiting)
                for adapter, batch in list(self._batches):
                    self._guarded(partial(self._step, adapter, batch), batch)
                self._batches = [each for each in self._batches if each[1].rows]
                self._report_if_due()
        self._reader.close()

    def _read_orders(self, *, waits: bool) -> None:
        with suppress(Empty):
            while True:
                line = self._lines.get(block=waits)
                waits = False
                if line is None:
                    self._ended = True
                    return
                order = AnswerOrder.model_validate_json(line)
                if order.order is None:
                    self._orders.remove(order.id)
                    self._cancel(order.id)
                else:
                    self._orders.add(order)

    def _prepare_orders(self, *, is_answering: bool) -> None:
        """Prepares the next requests, for a short time.

        Args:
            is_answering: whether there are answers to go on with.
        """
        began = time.monotonic()
        if is_answering and began < self._prepare_at:
            return
        now = began
        while self._orders and now < began + _PREPARE_SECONDS:
            given = self._orders.take()
            assert given.order is not None
            self._prepare(given, given.order)
            now = time.monotonic()
        self._prepare_at = 2 * now - began

    def _prepare(self, asked: AnswerOrder, order: InferenceOrder) -> None:
        """Prepares the choices of a request."""
        request_id = asked.id
        try:
            adapter = self._adapter(order.adapter(), asked.adapter_path)
            choices = self._choices(request_id, order)
            echoed = self._echoed(order, choices) if order.echo else ()
        except NotShared:
            self._report(Reported(id=request_id, not_shared=True))
            return
        except Refused as refusal:
            self._refuse(request_id, refusal.error)
            return
        except CannotTrain as error:
            self._refuse(request_id, refused(f"{error}.", field="model").error)
            return
        except Exception as error:  # tokenizers and templates may raise anything, quoting what users wrote
            self._refuse(request_id, unexpected(error))
            return
        by_prompt = [
            choices[first : first + order.choices] for first in range(0, len(choices), order.choices)
        ]
        prompt_tokens = sum(len(own[0].prompt) for own in by_prompt)
        self._requests[request_id] = _Request(asked.key_id, choices, prompt_tokens, order.streams)
        if echoed:
            self._report(Reported(id=request_id, part=AnswerPart(deltas=echoed)))
        if choices[0].max_tokens == 0:
            for choice in choices:
                choice.finish_reason = "length"
            ended = [ChoiceDelta(index=each.index, finish_reason="length") for each in choices]
            self._unreported[request_id] = ended
            self._report_deltas(request_id)
            return
        self._waiting += [(adapter, own) for own in by_prompt]

    def _echoed(self, order: InferenceOrder, choices: Sequence[Choice]) -> tuple[ChoiceDelta, ...]:
        """The prompts, with which the answers of a request begin.

        Raises:
            Refused: they are too long together.
        """
        texts = [
            each if isinstance(each, str) else str(self._loaded.tokenizer.decode(list(each)))
            for each in order.prompts
        ]
        characters = order.choices * sum(map(len, texts))
        if characters > _MOST_ECHOED:
            raise refused(
                f"With echo, the answer would repeat {characters:,} characters of prompts, and at most "
                f"{_MOST_ECHOED:,} are allowed: leave echo out, or ask for fewer choices (n) or prompts.",
                field="echo",
            )
        own = [text for text in texts for _ in range(order.choices)]
        return tuple(
            ChoiceDelta(index=choice.index, text=text) for choice, text in zip(choices, own, strict=True)
        )

    def _adapter(self, layer: ModelLayer | None, path: str | None) -> str | None:
        if layer is None or path is None:
            return None
        waiting = {adapter for adapter, _ in self._waiting}
        self._loaded.add_adapter(layer, Path(path), {*waiting, *(own for own, _ in self._batches)})
        return layer.name

    def _choices(self, request_id: str, order: InferenceOrder) -> list[Choice]:
        sampling = self._loaded.defaults.sampling(order.sampling)
        tokens, texts = self._reader.ends(order)
        made: list[Choice] = []
        for prompt in self._reader.prompts(order):
            room = self._loaded.context - len(prompt)
            for _ in range(order.choices):
                source = torch.Generator(self._loaded.device)
                if order.sampling.seed is None:
                    source.seed()
                else:
                    source.manual_seed((order.sampling.seed + len(made)) % 2**63)
                made.append(
                    Choice(
                        request_id=request_id,
                        index=len(made),
                        prompt=prompt,
                        max_tokens=room if order.max_tokens is None else min(order.max_tokens, room),
                        ends=self._loaded.ends | tokens,
                        sampling=sampling,
                        text=TextStream(self._loaded.tokenizer, (*order.stop, *texts)),
                        tokenizer=self._loaded.tokenizer,
                        source=source,
                        logprobs=order.logprobs,
                    )
                )
        return made

    def _begin_waiting(self) -> None:
        """Lets waiting choices join a batch, as long as there is room."""
        while self._waiting:
            self._bring_next_forward()
            adapter, choices = self._waiting[0]
            if not self._together:
                self._waiting.popleft()
                for choice in choices:
                    if choice.request_id in self._requests:
                        self._generate(adapter, choice)
                continue
            batch = self._batch_for(adapter, choices)
            if batch is None:
                return
            self._waiting.popleft()
            self._guarded(partial(self._join, adapter, batch, choices), choices=choices)
            if self._lines.qsize() or (self._orders and time.monotonic() >= self._prepare_at):
                return

    def _bring_next_forward(self) -> None:
        """Moves the choices whose turn it is to the front of the queue: those of the key, and then of the
        request, with the fewest rows."""
        by_key: Counter[str | None] = Counter()
        by_request: Counter[str] = Counter()
        for _, batch in self._batches:
            for row in batch.rows:
                by_request[row.request_id] += 1
                if (request := self._requests.get(row.request_id)) is not None:
                    by_key[request.key_id] += 1

        def rows(place: int) -> tuple[int, int, int]:
            request_id = self._waiting[place][1][0].request_id
            request = self._requests.get(request_id)
            own = by_key[request.key_id] if request is not None else 0
            return own, by_request[request_id], place

        first = min(range(len(self._waiting)), key=rows)
        if first:
            chosen = self._waiting[first]
            del self._waiting[first]
            self._waiting.appendleft(chosen)

    def _batch_for(self, adapter: str | None, choices: list[Choice]) -> Batch | None:
        """The batch that choices join; None if they have to wait.

        Raises:
            _RequestRefused: their cache needs more memory than there is.
        """
        rows = sum(len(batch.rows) for _, batch in self._batches)
        used = sum(len(batch.rows) * batch.columns_at_most for _, batch in self._batches)
        for own, batch in self._batches:
            elsewhere = used - len(batch.rows) * batch.columns_at_most
            if (
                own == adapter
                and rows + len(choices) <= MAX_ROWS
                and batch.takes(choices, self._tokens_at_most - elsewhere)
            ):
                return batch
        made = Batch(self._loaded.model, self._loaded.device)
        if (rows + len(choices) <= MAX_ROWS or not rows) and made.takes(choices, self._tokens_at_most - used):
            self._batches.append((adapter, made))
            return made
        if not self._batches:
            self._waiting.popleft()
            raise _RequestRefused(
                choices[0].request_id,
                unavailable(
                    f"The request may reach {len(choices) * choices[0].longest} tokens, and there is memory "
                    f"for {self._tokens_at_most}: ask for fewer tokens."
                ).error,
            )
        return None

    def _join(self, adapter: str | None, batch: Batch, choices: list[Choice]) -> None:
        with self._loaded.active(adapter):
            read = batch.read(choices)

        def join() -> None:
            self._take_all(batch, list(batch.join(read)))

        self._guarded(join, batch, choices)

    def _step(self, adapter: str | None, batch: Batch) -> None:
        """Makes a token for each row. If that fails, each row is read again by itself, so that only the
        request that caused the failure fails again; if the others then fail together, they go on alone."""
        if not batch.rows:
            return
        try:
            with self._loaded.active(adapter):
                taken = list(batch.step())
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if len(batch.rows) == 1 or self._is_device_lost():
                raise
            rows = list(batch.rows)
            batch.leave(rows)
            for row in rows:
                row.failed_passes += 1
            self._waiting.extendleft((adapter, [row]) for row in reversed(rows))
            return
        for row, _ in taken:
            row.failed_passes = 0
        self._take_all(batch, taken)

    def _take_all(self, batch: Batch, found: Sequence[tuple[Choice, Tensor]]) -> None:
        """Chooses the next token of rows, and removes those that end."""
        deltas: dict[str, list[ChoiceDelta]] = {}
        failed: dict[str, InferenceError] = {}
        plain = [choice.sampling.is_plain for choice, _ in found]
        tokens = torch.stack([logits for _, logits in found]).argmax(-1).tolist() if any(plain) else []
        for number, (choice, logits) in enumerate(found):
            try:  # one request's options must not end the others' answers
                token = tokens[number] if plain[number] else choice.next_token(logits)
                delta = choice.take(token, logits)
            except Exception as error:
                failed[choice.request_id] = self._reason(error)
                continue
            if delta is not None:
                deltas.setdefault(choice.request_id, []).append(delta)
        for request_id, reason in failed.items():
            self._refuse(request_id, reason)
        batch.leave([choice for choice, _ in found if choice.finish_reason is not None])
        for request_id, own in deltas.items():
            if request_id in failed:
                continue
            self._unreported.setdefault(request_id, []).extend(own)
            if self._is_over(request_id):
                self._report_deltas(request_id)

    def _generate(self, adapter: str | None, choice: Choice) -> None:
        """Answers a choice alone."""

        def take(own: Choice, logits: Tensor) -> bool:
            if (delta := own.take(own.next_token(logits), logits)) is not None:
                self._unreported.setdefault(own.request_id, []).append(delta)
            if self._is_over(own.request_id):
                self._report_deltas(own.request_id)
            self._report_if_due()
            self._read_orders(waits=False)
            self._prepare_orders(is_answering=True)
            return own.finish_reason is None and own.request_id in self._requests and not self._ended

        def answer() -> None:
            with self._loaded.active(adapter):
                one_at_a_time.generate(self._loaded.model, choice, take, self._loaded.device)

        self._guarded(answer, None, [choice])

    def _report_if_due(self) -> None:
        """Reports what was added to all requests, unless that was done a moment ago."""
        now = time.monotonic()
        if self._unreported and now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            for request_id, deltas in list(self._unreported.items()):
                if self._requests[request_id].streams or len(deltas) > _MAX_UNREPORTED:
                    self._report_deltas(request_id)

    def _is_over(self, request_id: str) -> bool:
        """Whether all choices of a request have ended."""
        request = self._requests.get(request_id)
        return request is None or all(choice.finish_reason is not None for choice in request.choices)

    def _report_deltas(self, request_id: str) -> None:
        """Reports what was added to a request's choices, and its end with the last of them."""
        request, deltas = self._requests.get(request_id), self._unreported.pop(request_id, [])
        if request is None:
            return
        usage = None
        if self._is_over(request_id):
            made = sum(len(choice.made) for choice in request.choices)
            usage = Usage(prompt_tokens=request.prompt_tokens, completion_tokens=made)
            del self._requests[request_id]
        part = merged_parts([AnswerPart(deltas=tuple(deltas), usage=usage)])
        self._report(Reported(id=request_id, part=part))

    def _refuse(self, request_id: str, error: InferenceError) -> None:
        self._cancel(request_id)
        self._report(Reported(id=request_id, part=AnswerPart(error=error)))

    def _cancel(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._unreported.pop(request_id, None)
        self._waiting = deque(each for each in self._waiting if each[1][0].request_id != request_id)
        for _, batch in self._batches:
            batch.leave([row for row in batch.rows if row.request_id == request_id])

    def _guarded(
        self, work: Callable[[], None], batch: Batch | None = None, choices: Sequence[Choice] = ()
    ) -> None:
        """Does work; if it fails, the requests that it was for get the reason."""
        try:
            work()
        except _RequestRefused as error:
            self._refuse(error.request_id, error.error)
        except Exception as error:
            failed = {each.request_id for each in (*(batch.rows if batch is not None else ()), *choices)}
            if batch is not None:
                batch.leave(list(batch.rows))
            reason = self._reason(error)
            for request_id in failed:
                self._refuse(request_id, reason)

    def _reason(self, error: Exception) -> InferenceError:
        """What requests get to know of an error. If the process cannot use its GPU any more, it ends."""
        if isinstance(error, torch.OutOfMemoryError):
            return _out_of_memory()
        self._ended |= self._is_device_lost()
        return unexpected(error)

    def _is_device_lost(self) -> bool:
        """Whether the process cannot use its GPU any more: after a failed kernel, every call fails."""
        if self._loaded.device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self._loaded.device)
        except RuntimeError:
            return True
        return False


class _RequestRefused(Exception):
    """The reason why one request is refused."""

    def __init__(self, request_id: str, error: InferenceError) -> None:
        super().__init__(error.message)
        self.request_id, self.error = request_id, error


def _out_of_memory() -> InferenceError:
    return unavailable(
        "The device ran out of memory while answering: send shorter requests, or fewer at once."
    ).error


def unexpected(error: Exception) -> InferenceError:
    return InferenceError(
        status=500, code="internal_error", message=f"The model could not answer ({type(error).__name__})."
    )


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return available_on_host()
