"""An engine's answers are those of transformers' `generate`: for one request and many at once, with rows that
join and leave, with adapters and without."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import GenerationConfig

from app.contract.architecture import BUILT_IN_MODEL
from app.contract.inference import AnswerPart, InferenceOrder, SamplingOptions, TokenLogprob
from app.contract.model_fingerprint import fingerprint_of_files
from app.contract.model_reference import LoraSpec, ModelLayer, ModelReference
from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from tests.harness.any_family import ALL, long_rope, make_any, small_config
from workers.inference.answer_parts import merged_parts
from workers.inference.answer_queue import AnswerQueue
from workers.inference.batch import Batch
from workers.inference.batching_check import check_batching
from workers.inference.choice import Choice
from workers.inference.engine import Engine
from workers.inference.loading import Loaded, load
from workers.inference.prompts import PromptReader
from workers.inference.protocol import AnswerOrder, Reported
from workers.inference.sampling import Sampling, SamplingDefaults
from workers.training.models.adapters import with_adapters
from workers.training.models.tiny_gpt2 import make_tokenizer

CPU = torch.device("cpu")
TOKENIZER = make_tokenizer()
FAMILIES = ("gpt2", "llama", "opt", "mistral", "qwen3_next", "gemma3_text", "bloom", "mamba")
"""Learned, rotary and ALiBi positions, windows, linear attention, and a state space."""
GREEDY = SamplingOptions(temperature=0)
MODEL = ModelReference(name=BUILT_IN_MODEL, source="built_in", architecture=from_config(TINY_GPT2))


def quickly(families: Sequence[str], *quick: str) -> list[Any]:
    """The families as parameters, of which only a few are tested by make test."""
    marks = {family: () if family in quick else pytest.mark.thorough for family in families}
    return [pytest.param(family, marks=mark) for family, mark in marks.items()]


def make(family: str, **changes: Any) -> Any:
    config = small_config(family)
    config.update(changes)
    if family == "qwen3_next":
        config.layer_types = ["linear_attention", "full_attention"]
    model = make_any(config).eval().requires_grad_(False)
    with torch.no_grad():  # else most tokens would be nearly equally probable
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "router" not in name:
                weight.mul_(4)
    return model


def prompts_of(count: int) -> list[tuple[int, ...]]:
    source = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 60, (count,), generator=source).tolist()
    return [tuple(torch.randint(256, (length,), generator=source).tolist()) for length in lengths]


def generated(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    own = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=256, pad_token_id=257)
    given = torch.tensor([prompt])
    made = model.generate(input_ids=given, attention_mask=torch.ones_like(given), generation_config=own)
    return [token for token in made[0, len(prompt) :].tolist() if token != 256]


def answers(
    loaded: Loaded, orders: list[AnswerOrder], when: Callable[[Reported], None] = lambda _: None
) -> dict[str, AnswerPart]:
    """The answer to each order, whose parts are put together."""
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    parts: dict[str, list[AnswerPart]] = {}
    left = {order.id for order in orders}

    def report(reported: Reported) -> None:
        when(reported)
        if reported.id is not None and reported.part is not None:
            parts.setdefault(reported.id, []).append(reported.part)
            if reported.part.is_last:
                left.discard(reported.id)
                if not left:
                    lines.put(None)

    engine = Engine(loaded, lines, report)
    for order in orders:
        lines.put(order.model_dump_json().encode())
    running = threading.Thread(target=engine.run)
    running.start()
    running.join(120)
    assert not running.is_alive()
    return {request_id: merged_parts(own) for request_id, own in parts.items()}


def loaded_with(model: Any, tokenizer: Any = TOKENIZER) -> Loaded:
    return Loaded(model, tokenizer, CPU, SamplingDefaults(), frozenset([256]))


def ordered(prompt: tuple[int, ...] | str, max_tokens: int = 24, **given: Any) -> InferenceOrder:
    options = {"sampling": GREEDY, "streams": True, **given}
    return InferenceOrder(model=MODEL, prompts=(prompt,), max_tokens=max_tokens, **options)


def tokens_in(answer: AnswerPart, index: int = 0) -> list[int]:
    """The tokens of a choice: log probabilities name each of them."""
    own = next(delta for delta in answer.deltas if delta.index == index)
    assert own.logprobs is not None
    return [token_of(each) for each in own.logprobs]


def token_of(each: TokenLogprob) -> int:
    return next(token for token in range(260) if NAMES[token] == each.token)


class Numbers:
    """A tokenizer whose tokens can be told apart: bytes that are no characters cannot."""

    eos_token_id, chat_template, all_special_ids, is_fast = 256, None, (), False

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(NAMES[token] for token in tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) - 0x4E00 for letter in text])

    def __len__(self) -> int:
        return 260


NAMES = [chr(0x4E00 + token) for token in range(260)]


@pytest.mark.parametrize("family", quickly(FAMILIES, "gpt2", "gemma3_text"))
def test_answers_equal_generate_alone_and_together(family: str) -> None:
    model = make(family)
    prompts = prompts_of(16)
    expected = ["".join(NAMES[token] for token in generated(model, prompt, 24)) for prompt in prompts]
    loaded = loaded_with(model, Numbers())
    orders = [AnswerOrder(id=str(number), order=ordered(prompt)) for number, prompt in enumerate(prompts)]
    together = answers(loaded, orders)
    assert [text_of(together[str(number)]) for number in range(16)] == expected
    assert text_of(answers(loaded, orders[:1])["0"]) == expected[0]


def text_of(answer: AnswerPart, index: int = 0) -> str:
    assert answer.error is None, answer.error
    return next((delta.text for delta in answer.deltas if delta.index == index), "")


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL)
def test_every_family_answers_as_generate(family: str) -> None:
    """Each that transformers itself can generate with at this size."""
    try:
        model = make(family)
        prompts = prompts_of(5)
        expected = ["".join(NAMES[token] for token in generated(model, prompt, 10)) for prompt in prompts]
    except Exception as error:
        pytest.skip(f"transformers: {type(error).__name__}")
    orders = [AnswerOrder(id=str(number), order=ordered(each, 10)) for number, each in enumerate(prompts)]
    found = answers(loaded_with(model, Numbers()), orders)
    assert [text_of(found[str(number)]) for number in range(5)] == expected


def test_families_whose_rows_agree_are_computed_together() -> None:
    found = {family: check_batching(make(family), CPU).agree for family in FAMILIES}
    assert found == {**dict.fromkeys(FAMILIES, True), "mamba": found["mamba"]}


def test_rows_that_depend_on_the_longest_are_computed_alone() -> None:
    model = make_any(long_rope()).eval()
    assert not check_batching(model, CPU).agree
    prompts = prompts_of(4)
    orders = [AnswerOrder(id=str(number), order=ordered(each, 4)) for number, each in enumerate(prompts)]
    found = answers(loaded_with(model, Numbers()), orders)
    for number, prompt in enumerate(prompts):
        assert text_of(found[str(number)]) == "".join(NAMES[token] for token in generated(model, prompt, 4))


def test_requests_join_while_others_are_answered() -> None:
    model = make("llama")
    prompts = prompts_of(6)
    loaded = loaded_with(model, Numbers())
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    texts: dict[str, str] = {}
    ended: list[str] = []

    def add(number: int) -> None:
        order = AnswerOrder(id=str(number), order=ordered(prompts[number], 10 + 3 * number))
        lines.put(order.model_dump_json().encode())

    def report(reported: Reported) -> None:
        if reported.id is None or reported.part is None:
            return
        for delta in reported.part.deltas:
            before = texts.get(reported.id, "")
            texts[reported.id] = before + delta.text
            if not before and int(reported.id) < 5:
                add(int(reported.id) + 1)  # the next one joins once this one has begun
        if reported.part.is_last:
            ended.append(reported.id)
            if len(ended) == 6:
                lines.put(None)

    engine = Engine(loaded, lines, report)
    add(0)
    engine.run()
    for number, prompt in enumerate(prompts):
        expected = "".join(NAMES[token] for token in generated(model, prompt, 10 + 3 * number))
        assert texts[str(number)] == expected


def test_keys_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.inference.engine.MAX_ROWS", 2)
    ended: list[str] = []
    orders = [
        AnswerOrder(id=f"{key}{number}", order=ordered(prompts_of(1)[0], 5), key_id=key)
        for key, count in (("a", 6), ("b", 2))
        for number in range(count)
    ]
    last = {order.id for order in orders}

    def note(reported: Reported) -> None:
        if reported.part is not None and reported.part.is_last and reported.id in last:
            ended.append(str(reported.id))

    answers(loaded_with(make("llama"), Numbers()), orders, note)
    assert len(ended) == 8
    assert {"b0", "b1"} <= set(ended[:5])


@pytest.mark.parametrize("together", [True, False])
def test_a_key_with_slow_prompts_does_not_delay_another_key(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Preparing any prompt takes longer than may pass between two steps here, as long texts do."""
    read: list[str] = []
    ended: list[tuple[str, int]] = []
    honest = PromptReader.prompts

    def counted(self: PromptReader, order: InferenceOrder) -> list[list[int]]:
        read.append("a" if order.max_tokens == 3 else "b")
        return honest(self, order)

    def note(reported: Reported) -> None:
        if reported.part is not None and reported.part.is_last:
            ended.append((str(reported.id), len(read)))

    monkeypatch.setattr(PromptReader, "prompts", counted)
    monkeypatch.setattr("workers.inference.engine._PREPARE_SECONDS", 1e-9)
    if not together:
        alone = replace(check_batching(make("llama"), CPU), agree=False)
        monkeypatch.setattr("workers.inference.engine.batching_check.check_batching", lambda *_: alone)
    [prompt] = prompts_of(1)
    orders = [AnswerOrder(id=f"a{number}", order=ordered(prompt, 3), key_id="a") for number in range(20)]
    orders.append(AnswerOrder(id="b", order=ordered(prompt, 4), key_id="b"))
    answers(loaded_with(make("llama"), Numbers()), orders, note)
    assert len(ended) == 21
    read_before = dict(ended)
    assert read[:2] == ["a", "b"]
    assert read_before["b"] <= 10  # at most one for each of the few steps that it takes


def test_a_request_that_is_cancelled_while_it_waits_is_not_prepared() -> None:
    orders = AnswerQueue()
    for request_id, key_id in (("0", "a"), ("1", "a"), ("2", "b"), ("3", None)):
        orders.add(AnswerOrder(id=request_id, order=ordered((1,)), key_id=key_id))
    orders.remove("0")
    orders.remove("2")
    orders.remove("unknown")
    assert [orders.take().id, orders.take().id] == ["1", "3"]
    assert not orders


def test_a_cancelled_request_leaves_the_others_alone() -> None:
    model = make("llama")
    prompts = prompts_of(3)
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    texts: dict[str, str] = {}
    cancelled: list[bool] = []
    ended: list[str] = []

    def report(reported: Reported) -> None:
        if reported.id is None or reported.part is None:
            return
        for delta in reported.part.deltas:
            texts[reported.id] = texts.get(reported.id, "") + delta.text
        if reported.id == "0" and len(texts["0"]) >= 3 and not cancelled:
            cancelled.append(True)
            lines.put(AnswerOrder(id="0").model_dump_json().encode())
        ended.extend([reported.id] if reported.part.is_last else [])
        if cancelled and ended:
            lines.put(None)

    engine = Engine(loaded_with(model, Numbers()), lines, report)
    for number in (0, 1):
        order = AnswerOrder(id=str(number), order=ordered(prompts[number], 300 if number == 0 else 20))
        lines.put(order.model_dump_json().encode())
    engine.run()
    assert 3 <= len(texts["0"]) < 300
    assert texts["1"] == "".join(NAMES[token] for token in generated(model, prompts[1], 20))


def adapter(
    model: Any, folder: Path, rank: int, seed: int, targets: tuple[str, ...] | None = None
) -> tuple[ModelLayer, Path]:
    """Saved adapters with random values, as a job leaves them."""
    lora = LoraSpec(r=rank, alpha=2 * rank, dropout=0.0, target_modules=targets, merge=False)
    adapted = with_adapters(model, lora, seed=seed)
    with torch.no_grad():
        source = torch.Generator().manual_seed(seed)
        for name, weight in adapted.named_parameters():
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=source) * 0.3)
    adapted.save_pretrained(folder)
    layer = ModelLayer(
        name=f"ft:{seed}",
        job_id="ftjob-1",
        folder="model",
        lora=lora,
        fingerprint=fingerprint_of_files(folder),
    )
    return layer, folder


@pytest.mark.parametrize(
    "family", quickly(["gpt2", "llama", "opt", "mistral", "gemma3_text", "bloom"], "gpt2", "llama")
)
def test_adapters_share_the_model(family: str, tmp_path: Path) -> None:
    layers = [adapter(make(family), tmp_path / str(rank), rank, seed=rank) for rank in (2, 4)]
    prompts = prompts_of(4)
    expected: list[str] = []
    for layer, path in layers:
        merged_model = tuned(make(family), layer, path)
        expected += ["".join(NAMES[t] for t in generated(merged_model, each, 12)) for each in prompts]
    plain = make(family)
    expected += ["".join(NAMES[token] for token in generated(plain, each, 12)) for each in prompts]
    assert len(set(expected)) > len(prompts)  # the adapters have an effect
    orders = []
    for own in (*layers, None):
        for prompt in prompts:
            reference = MODEL
            if own is not None:
                reference = MODEL.model_copy(
                    update={"name": own[0].name, "base": MODEL.name, "layers": (own[0],)}
                )
            order = ordered(prompt, 12).model_copy(update={"model": reference})
            path = None if own is None else str(own[1])
            orders.append(AnswerOrder(id=str(len(orders)), order=order, adapter_path=path))
    found = answers(loaded_with(make(family), Numbers()), orders)
    assert [text_of(found[str(number)]) for number in range(len(orders))] == expected


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft, about such heads
def test_adapters_on_a_head_that_is_tied_to_the_embeddings_answer(tmp_path: Path) -> None:
    def tied() -> Any:
        return make("llama", tie_word_embeddings=True)

    layer, path = adapter(tied(), tmp_path / "own", 4, seed=1, targets=("lm_head", "q_proj"))
    with_head = load_file(path / "adapter_model.safetensors")  # as earlier versions and peft save it
    assert any(".base_layer." in name and ".lora_" not in name for name in with_head)
    prompt = prompts_of(1)[0]
    reference = MODEL.model_copy(update={"name": layer.name, "base": MODEL.name, "layers": (layer,)})
    order = ordered(prompt, 12).model_copy(update={"model": reference})
    found = answers(
        loaded_with(tied(), Numbers()), [AnswerOrder(id="a", order=order, adapter_path=str(path))]
    )
    expected = "".join(NAMES[token] for token in generated(tuned(tied(), layer, path), prompt, 12))
    assert text_of(found["a"]) == expected
    assert expected != "".join(NAMES[token] for token in generated(tied(), prompt, 12))


def tuned(model: Any, layer: ModelLayer, path: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, path).eval()


def test_choices_are_drawn_apart_and_repeatably() -> None:
    loaded = loaded_with(make("llama"), Numbers())
    order = ordered(prompts_of(1)[0], 16, choices=4, sampling=SamplingOptions(temperature=1, seed=4))
    first, second = (answers(loaded, [AnswerOrder(id="a", order=order)])["a"] for _ in range(2))
    texts = [text_of(first, index) for index in range(4)]
    assert len(set(texts)) == 4
    assert texts == [text_of(second, index) for index in range(4)]
    assert first.usage is not None
    assert first.usage.prompt_tokens == len(order.prompts[0])


def test_log_probabilities_are_those_of_the_model() -> None:
    model = make("llama")
    prompt = prompts_of(1)[0]
    order = ordered(prompt, 5, logprobs=3)
    found = answers(loaded_with(model, Numbers()), [AnswerOrder(id="a", order=order)])["a"]
    made = tokens_in(found)
    whole = torch.log_softmax(model(torch.tensor([[*prompt, *made]])).logits[0].float(), dim=-1)
    assert found.deltas[0].logprobs is not None
    for place, each in enumerate(found.deltas[0].logprobs):
        row = whole[len(prompt) + place - 1]
        assert each.logprob == pytest.approx(float(row[made[place]]), abs=1e-4)
        assert [other.logprob for other in each.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_a_chat_is_rendered_and_ends_with_the_turn() -> None:
    model = make("gpt2")
    order = InferenceOrder(
        model=MODEL, messages=({"role": "user", "content": "Hi"},), max_tokens=5, sampling=GREEDY
    )
    prompt = TOKENIZER("<|turn|>user\nHi<|end|>\n<|turn|>assistant\n", add_special_tokens=False).input_ids
    end = TOKENIZER.convert_tokens_to_ids("<|end|>")
    found = answers(loaded_with(model), [AnswerOrder(id="a", order=order)])["a"]
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(prompt)
    forced = order.model_copy(update={"sampling": SamplingOptions(temperature=0, logit_bias={end: 100})})
    ended = answers(loaded_with(model), [AnswerOrder(id="a", order=forced)])["a"]
    assert (text_of(ended), ended.deltas[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ({"prompts": (tuple(range(256)) * 3,)}, "context_length_exceeded", "context has 512 tokens"),
        ({"prompts": ((300,),)}, "invalid_request", "smaller than 260"),
        ({"messages": ({"role": "user", "content": "Hi"},)}, "no_chat_template", "has no chat template"),
    ],
)
def test_what_cannot_be_answered_is_refused(given: dict[str, Any], code: str, message: str) -> None:
    order = InferenceOrder(model=MODEL, max_tokens=5, **given)
    found = answers(loaded_with(make("llama"), Numbers()), [AnswerOrder(id="a", order=order)])["a"]
    assert found.error is not None
    assert (found.error.status, found.error.code) == (400, code)
    assert message in found.error.message


def test_a_turn_ends_with_an_added_special_token() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<|over|>", special=True)])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|over|>{% endfor %}"
    order = InferenceOrder(model=MODEL, messages=({"role": "user", "content": "Hi"},))
    reader = PromptReader(tokenizer, 100, len(tokenizer))
    assert reader.ends(order) == (frozenset([tokenizer.convert_tokens_to_ids("<|over|>")]), ())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}<|over|>{% endfor %}"
    changed = PromptReader(tokenizer, 100, len(tokenizer))
    assert changed.ends(order) == (frozenset(), ())
    reader.close()
    changed.close()


def test_a_long_answer_is_reported_in_parts() -> None:
    order = ordered(prompts_of(1)[0][:5], 400, logprobs=2, streams=False)
    parts: list[AnswerPart] = []

    def note(reported: Reported) -> None:
        if reported.part is not None:
            parts.append(reported.part)

    tokens = {256: -100.0}  # else it may end early
    order = order.model_copy(update={"sampling": SamplingOptions(temperature=0, logit_bias=tokens)})
    answers(loaded_with(make("gpt2"), Numbers()), [AnswerOrder(id="a", order=order)], note)
    assert len(parts) > 1
    assert sum(len(delta.logprobs or ()) for part in parts for delta in part.deltas) == 400


def test_bytes_of_a_part_of_a_character() -> None:
    model = make("gpt2")
    (first, *_) = TOKENIZER("\N{SNOWMAN}", add_special_tokens=False).input_ids
    order = ordered("one", 1, logprobs=0, sampling=SamplingOptions(temperature=0, logit_bias={first: 100}))
    found = answers(loaded_with(model), [AnswerOrder(id="a", order=order)])["a"]
    assert found.deltas[0].logprobs is not None
    assert found.deltas[0].logprobs[0].bytes == (0xE2,)


def test_a_loaded_model_has_no_defaults_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_any(small_config("gpt2")).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    given = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 2, "eos_token_id": [256, 7]}
    (folder / "generation_config.json").write_text(json.dumps(given))
    reference = ModelReference(name="m", source="local", architecture=MODEL.architecture)
    loaded = load(reference, str(folder), [], tmp_path / "staged", CPU)
    assert loaded.model.generation_config.repetition_penalty in (None, 1.0)
    assert loaded.ends == {256, 7}
    assert loaded.defaults.sampling(SamplingOptions()).repetition_penalty == 5.0


def test_adapters_are_unloaded_if_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.inference.loading.MAX_ADAPTERS", 1)
    layers = [adapter(make("llama"), tmp_path / str(rank), rank, seed=rank) for rank in (2, 4)]
    prompt = prompts_of(1)[0]
    expected = [
        "".join(NAMES[token] for token in generated(tuned(make("llama"), *own), prompt, 8)) for own in layers
    ]
    loaded = loaded_with(make("llama"), Numbers())
    for number in (0, 1, 0):
        layer, path = layers[number]
        reference = MODEL.model_copy(update={"name": layer.name, "base": MODEL.name, "layers": (layer,)})
        order = ordered(prompt, 8).model_copy(update={"model": reference})
        found = answers(loaded, [AnswerOrder(id="a", order=order, adapter_path=str(path))])
        assert text_of(found["a"]) == expected[number]
        assert list(loaded._names) == [layer.name]


def test_an_error_of_a_template_quotes_nothing() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception(messages[0]['content']) }}"
    order = InferenceOrder(model=MODEL, messages=({"role": "user", "content": "secret"},), max_tokens=5)
    found = answers(loaded_with(make("gpt2"), tokenizer), [AnswerOrder(id="a", order=order)])["a"]
    assert found.error is not None
    assert found.error.field == "messages"
    assert "secret" not in json.dumps(found.model_dump())


def test_an_answer_ends_at_the_context() -> None:
    loaded = loaded_with(make("llama"), Numbers())
    order = ordered(tuple([7] * 508), 100)
    found = answers(loaded, [AnswerOrder(id="a", order=order)])["a"]
    assert found.usage is not None
    assert found.usage.completion_tokens <= 4


def test_echo_begins_with_the_prompt() -> None:
    loaded = loaded_with(make("gpt2"))
    echoed = answers(loaded, [AnswerOrder(id="a", order=ordered("one two", 0, echo=True))])["a"]
    assert (text_of(echoed), echoed.deltas[0].finish_reason) == ("one two", "length")


@pytest.mark.parametrize("together", [True, False])
def test_a_request_whose_token_cannot_be_chosen_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    honest = Sampling.choose

    def choose(self: Sampling, logits: Tensor, prompt: list[int], *rest: Any) -> int:
        if len(prompt) == 3:
            raise RuntimeError("probability tensor contains inf")
        return honest(self, logits, prompt, *rest)

    monkeypatch.setattr(Sampling, "choose", choose)
    if not together:
        alone = replace(check_batching(make("llama"), CPU), agree=False)
        monkeypatch.setattr("workers.inference.engine.batching_check.check_batching", lambda *_: alone)
    model, good, bad = make("llama"), (5, 6, 7, 8), (5, 6, 7)
    sampled = SamplingOptions(temperature=0, logit_bias={256: -100})
    orders = [
        AnswerOrder(id=name, order=ordered(prompt, 12, sampling=sampled))
        for name, prompt in (("good", good), ("bad", bad))
    ]
    found = answers(loaded_with(model, Numbers()), orders)
    assert found["bad"].error is not None
    assert found["bad"].error.code == "internal_error"
    assert len(text_of(found["good"])) == 12


class MoreNumbers(Numbers):
    """A tokenizer with more tokens than the model has embeddings."""

    def __len__(self) -> int:
        return 300

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<|extra {token}|>"


@pytest.mark.parametrize("prompt", [(5, 299), "".join(map(chr, (0x4E00 + 5, 0x4E00 + 299)))])
def test_a_token_without_an_embedding_is_refused(prompt: tuple[int, ...] | str) -> None:
    loaded = loaded_with(make("llama"), MoreNumbers())
    readable = loaded.model.get_input_embeddings().weight.shape[0]
    orders = [
        AnswerOrder(id="good", order=ordered((5, 6, 7), 12)),
        AnswerOrder(id="bad", order=ordered(prompt, 4)),
    ]
    found = answers(loaded, orders)
    assert found["bad"].error is not None
    assert found["bad"].error.status == 400
    assert f"the token 299 (<|extra 299|>), but the model has only {readable}" in found["bad"].error.message
    assert found["good"].error is None


@pytest.mark.parametrize("in_prompt", [True, False])
def test_a_failed_forward_pass_ends_only_the_request_that_caused_it(
    monkeypatch: pytest.MonkeyPatch, in_prompt: bool
) -> None:
    """A row fails when its prompt is read, or later, when it is computed together with others."""
    model = make("llama")
    prompts = {"a": (5, 6, 7, 8), "bad": (9, 10, 11), "b": (12, 13), "c": (14, 15, 16, 17, 18)}
    alone = {
        name: answers(loaded_with(model, Numbers()), [AnswerOrder(id=name, order=ordered(prompt, 12))])[name]
        for name, prompt in prompts.items()
    }
    step, read = Batch.step, Batch.read
    together: list[int] = []

    def failing_step(self: Batch) -> Any:
        if not in_prompt and any(row.request_id == "bad" and len(row.made) > 3 for row in self.rows):
            together.clear()
            raise RuntimeError("this position does not exist")
        together.append(len(self.rows))
        return step(self)

    def failing_read(self: Batch, choices: Sequence[Choice]) -> Any:
        if choices[0].request_id == "bad" and (in_prompt or len(choices[0].made) > 3):
            raise RuntimeError("this position does not exist")
        return read(self, choices)

    monkeypatch.setattr(Batch, "step", failing_step)
    monkeypatch.setattr(Batch, "read", failing_read)
    orders = [AnswerOrder(id=name, order=ordered(prompt, 12)) for name, prompt in prompts.items()]
    found = answers(loaded_with(model, Numbers()), orders)
    assert found["bad"].error is not None
    assert (found["bad"].error.status, found["bad"].error.code) == (500, "internal_error")
    for name in ("a", "b", "c"):
        assert found[name].error is None
        assert text_of(found[name]) == text_of(alone[name])
        assert found[name].usage == alone[name].usage
    assert max(together) == 3, "the others are computed together again"


def test_a_context_with_another_name_is_known() -> None:
    model = make("mpt", max_seq_len=64)
    found = answers(loaded_with(model, Numbers()), [AnswerOrder(id="a", order=ordered((7,) * 60, 100))])["a"]
    assert found.error is None
    assert found.usage is not None
    assert found.usage.completion_tokens <= 4


def test_a_long_echo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.inference.engine._MOST_ECHOED", 20)
    loaded = loaded_with(make("gpt2"))
    orders = [
        AnswerOrder(id="short", order=ordered("1234567890", 0, echo=True, choices=2)),
        AnswerOrder(id="long", order=ordered("1234567890", 0, echo=True, choices=3)),
    ]
    found = answers(loaded, orders)
    assert found["short"].error is None
    assert found["long"].error is not None
    assert (found["long"].error.status, found["long"].error.field) == (400, "echo")
    assert "would repeat 30 characters of prompts, and at most 20 are" in found["long"].error.message
