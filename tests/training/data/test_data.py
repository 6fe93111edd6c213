import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.contract.data_formats import BadLine, Chat, parse_line
from app.contract.spec import DataSpec
from tests.harness.data import spec, with_digest_of
from tests.harness.runs import write_texts
from workers.training.data import rendering
from workers.training.data.preparation import PreparationStatistics, Samples, prepare
from workers.training.exceptions import CannotTrain, Interrupted
from workers.training.models.tiny_gpt2 import make_tokenizer

EOS = 256


def rows(tmp_path: Path, spec: DataSpec, *lines: dict[str, Any]) -> list[tuple[str, str]]:
    """Each sample as its text, and the text of those tokens that count."""
    source = tmp_path / "data.jsonl"
    source.write_text("\n\n".join(json.dumps(line) for line in lines))
    tokenizer = make_tokenizer()
    prepare(with_digest_of(source, spec), source, tokenizer, tmp_path / "prepared")
    samples = Samples(tmp_path / "prepared")
    found = []
    for sample in range(len(samples)):
        tokens, counts = samples.read(sample)
        assert len(tokens) == samples.lengths[sample]
        assert int(counts[1:].sum()) == samples.targets[sample]
        found.append((tokenizer.decode(tokens), tokenizer.decode(tokens[counts])))
    samples.close()
    return found


def test_all_tokens_of_a_text_count_and_an_end_token_is_added(tmp_path: Path) -> None:
    assert rows(tmp_path, spec(), {"text": "héllo"}) == [("héllo<|endoftext|>", "héllo<|endoftext|>")]


def test_only_the_completion_counts(tmp_path: Path) -> None:
    found = rows(tmp_path, spec("prompt_completion"), {"prompt": "2+2=", "completion": "4"})
    assert found == [("2+2=4<|endoftext|>", "4<|endoftext|>")]


def test_only_what_the_assistant_says_counts(tmp_path: Path) -> None:
    chat = [("system", "S"), ("user", "U"), ("assistant", "A1"), ("user", "V"), ("assistant", "A2")]
    line = {"messages": [{"role": role, "content": content} for role, content in chat]}
    [(whole, counted)] = rows(tmp_path, spec("messages"), line)
    assert whole.startswith("<|turn|>system\nS<|end|>\n<|turn|>user\nU<|end|>\n<|turn|>assistant\nA1")
    assert counted == "A1<|end|>\nA2<|end|>\n"


def test_a_turn_of_weight_0_is_only_context(tmp_path: Path) -> None:
    turns = [("user", "U", 1), ("assistant", "A1", 0), ("user", "V", 1), ("assistant", "A2", 1)]
    line = {
        "messages": [{"role": role, "content": content, "weight": weight} for role, content, weight in turns]
    }
    [(whole, counted)] = rows(tmp_path, spec("messages"), line)
    assert "A1" in whole
    assert counted == "A2<|end|>\n"


def test_special_tokens_in_a_text_are_tokens(tmp_path: Path) -> None:
    assert len(rows(tmp_path, spec(), {"text": "a"}, {"text": "b"}, {"text": "c"})) == 3


def test_overlong_samples_are_truncated_and_counted(tmp_path: Path) -> None:
    found = rows(tmp_path, spec(max_length=4), {"text": "abcdefghij"}, {"text": "abc"})
    assert [whole for whole, _ in found] == ["abcd", "abc<|endoftext|>"]


def test_overlong_samples_are_split_into_parts(tmp_path: Path) -> None:
    found = rows(tmp_path, spec(max_length=4, overlength="split"), {"text": "abcdefghij"})
    assert [whole for whole, _ in found] == ["abcd", "efgh", "ij<|endoftext|>"]


def test_overlong_samples_are_an_error_with_overlength_error(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="line 3 of the data has 11 tokens"):
        rows(tmp_path, spec(max_length=4, overlength="error"), {"text": "a"}, {"text": "abcdefghij"})


def test_nothing_to_learn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="none of the 1 samples has a token that counts"):
        rows(tmp_path, spec("prompt_completion", max_length=3), {"prompt": "abcdef", "completion": "x"})


def test_weights_of_zero_throughout_are_named_as_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="the weight of all 2 samples is 0"):
        rows(tmp_path, spec(), {"text": "a", "weight": 0}, {"text": "bcd", "weight": 0.0})


def test_a_bad_line_is_reported_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="line 3 of the data"):
        rows(tmp_path, spec(), {"text": "a"}, {"prompt": "b"})


def test_chats_require_a_chat_template(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(CannotTrain, match="has no chat template"):
        prepare(with_digest_of(source, spec("messages")), source, tokenizer, tmp_path / "prepared")


def test_a_second_attempt_reads_what_the_first_prepared(tmp_path: Path) -> None:
    rows(tmp_path, spec(), {"text": "abc"})
    source = tmp_path / "data.jsonl"
    same, other = with_digest_of(source, spec()), with_digest_of(source, spec(max_length=2))
    source.unlink()
    prepared = prepare(same, source, make_tokenizer(), tmp_path / "prepared")
    assert (prepared.samples, prepared.tokens) == (1, 4)
    with pytest.raises(FileNotFoundError):
        prepare(other, source, make_tokenizer(), tmp_path / "prepared")


def test_data_that_is_no_longer_what_was_uploaded_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_text(json.dumps({"text": "a"}))
    requested = with_digest_of(source, spec())
    source.write_text(json.dumps({"text": "b"}))
    with pytest.raises(CannotTrain, match="no longer what was uploaded"):
        prepare(requested, source, make_tokenizer(), tmp_path / "prepared")


def test_tokenising_stops_between_chunks_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.training.data.preparation._CHUNK", 10)
    source = write_texts(tmp_path / "data.jsonl", count=40)
    requested = with_digest_of(source, spec("text"))
    looks = iter([False, False, True])
    with pytest.raises(Interrupted):
        prepare(requested, source, make_tokenizer(), tmp_path / "prepared", interrupted=lambda: next(looks))
    assert prepare(requested, source, make_tokenizer(), tmp_path / "prepared").samples == 40


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
@pytest.mark.parametrize("tools", [{"tools": [TOOL]}, {"functions": [TOOL["function"]]}])
def test_tools_and_their_calls_reach_the_template(tmp_path: Path, arguments: Any, tools: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "two"},
    ]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    source = tmp_path / "data.jsonl"
    source.write_text(json.dumps({"messages": messages, **tools}))
    data = with_digest_of(source, spec("messages"))
    prepared = prepare(data, source, tokenizer, tmp_path / "prepared")
    tokens, counts = Samples(tmp_path / "prepared").read(0)
    assert tokenizer.decode(tokens).endswith('<user>1+1;<assistant>!add{"a": 1};<tool>2;<assistant>two;')
    assert tokenizer.decode(tokens).startswith('[[{"type": "function", "function": {"name": "add"')
    assert tokenizer.decode(tokens[counts]) == '!add{"a": 1};two;'
    assert prepared.unused_keys == []


def test_sharegpt_s_function_calls_become_tool_calls(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "S"},
        {"from": "human", "value": "1+1"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    chat = parse_line(json.dumps({"conversations": turns}))[1]
    assert isinstance(chat, Chat)
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    function = {"name": "add", "arguments": {"a": 1}}
    assert chat.messages[2].tool_calls == [{"type": "function", "function": function}]


def test_alpaca_s_history_is_context(tmp_path: Path) -> None:
    row = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}
    chat = parse_line(json.dumps(row))[1]
    assert isinstance(chat, Chat)
    assert [(m.role, m.content, m.weight) for m in chat.messages] == [
        ("system", "s", 1), ("user", "a", 1), ("assistant", "b", 0), ("user", "c", 1), ("assistant", "d", 1),
    ]  # fmt: skip


def test_a_conversation_that_cannot_be_rendered_is_named_among_many(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'endless' %}{% for i in range(10 ** 9) %}"
        "{% for j in range(10 ** 9) %}x{% endfor %}{% endfor %}{% endif %}{{ m.content }};{% endfor %}"
    )
    source = tmp_path / "data.jsonl"
    turns = ["a", "b", "endless", "c"]
    answer = {"role": "assistant", "content": "d"}
    chats = [{"messages": [{"role": "user", "content": turn}, answer]} for turn in turns]
    source.write_text("\n".join(map(json.dumps, chats)))
    data = with_digest_of(source, spec("messages", examples=4))
    with pytest.raises(CannotTrain, match=r"line 3 of the data: the model's chat template"):
        prepare(data, source, tokenizer, tmp_path / "prepared")


def test_progress_is_reported_between_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.training.data.preparation._CHUNK", 10)
    source = write_texts(tmp_path / "data.jsonl", count=25)
    data = with_digest_of(source, spec("text", examples=25))
    seen: list[tuple[int, int]] = []
    prepare(
        data, source, make_tokenizer(), tmp_path / "prepared",
        report=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(10, 25), (20, 25), (25, 25)]


def test_the_opening_of_a_chat_s_first_turn_does_not_count(tmp_path: Path) -> None:
    turns = [("assistant", "A1"), ("user", "U"), ("assistant", "A2")]
    line = {"messages": [{"role": role, "content": content} for role, content in turns]}
    [(whole, counted)] = rows(tmp_path, spec("messages"), line)
    assert whole.startswith("<|turn|>assistant\nA1")
    assert counted == "A1<|end|>\nA2<|end|>\n"


def test_openai_s_older_function_calls_are_tool_calls() -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    answer = {"role": "assistant", "content": None, "function_call": call}
    turns = [{"role": "user", "content": "1+1"}, answer]
    chat = parse_line(json.dumps({"messages": turns}))[1]
    assert isinstance(chat, Chat)
    function = {"name": "add", "arguments": {"a": 1}}
    assert chat.messages[1].tool_calls == [{"type": "function", "function": function}]


@pytest.mark.parametrize("said", ["[]", "{}", '{"arguments": {}}'])
def test_a_function_call_without_a_name_is_refused(said: str) -> None:
    with pytest.raises(BadLine, match="no name of a function"):
        parse_line(json.dumps({"conversations": [{"from": "function_call", "value": said}]}))


@pytest.mark.parametrize(("hard", "soft"), [(resource.RLIM_INFINITY, None), (60, None), (2, 2)])
def test_the_time_limit_of_a_template_keeps_an_inherited_hard_limit(
    monkeypatch: pytest.MonkeyPatch, hard: int, soft: int | None
) -> None:
    found: list[tuple[int, int]] = []
    used = SimpleNamespace(ru_utime=1.0, ru_stime=0.5)
    monkeypatch.setattr(rendering.resource, "getrusage", lambda _: used)
    monkeypatch.setattr(rendering.resource, "getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr(rendering.resource, "setrlimit", lambda _, limits: found.append(limits))
    rendering._limit_time()
    assert found == [(soft or 1 + rendering.CPU_SECONDS + 1, hard)]


LEAVES_OUT_REASONING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}[think]{% endif %}"
    "{{ m.content }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template like Qwen3's: only the last answer has its reasoning."""

LEAVES_OUT_THE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "<user>{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}"
    "{{ m.content }};{% elif m.role == 'assistant' %}<assistant>{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template like Mistral's: the system message is before the last message alone."""


def prepared_chats(
    tmp_path: Path, template: str, *chats: list[tuple[str, str]]
) -> tuple[PreparationStatistics, list[str], list[str]]:
    """What was prepared; and each sample's text, and that of its counted tokens."""
    source = tmp_path / "data.jsonl"
    messages = [[{"role": role, "content": content} for role, content in chat] for chat in chats]
    source.write_text("\n".join(json.dumps({"messages": each}) for each in messages))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    data = with_digest_of(source, spec("messages", examples=len(chats)))
    found = prepare(data, source, tokenizer, tmp_path / "prepared")
    samples = Samples(tmp_path / "prepared")
    read = [samples.read(sample) for sample in range(len(samples))]
    samples.close()
    return (
        found,
        [tokenizer.decode(tokens) for tokens, _ in read],
        [tokenizer.decode(tokens[counts]) for tokens, counts in read],
    )


def test_the_last_answer_is_learned_if_earlier_ones_are_rendered_differently(tmp_path: Path) -> None:
    """It follows exactly the text that is before it at inference."""
    long = [("user", "U"), ("assistant", "A1"), ("user", "V"), ("assistant", "A2"), ("user", "W")]
    found, whole, counted = prepared_chats(
        tmp_path, LEAVES_OUT_REASONING, long[:2], long[:4], [*long, ("assistant", "A3")]
    )
    assert counted == ["[think]A1;", "[think]A2;", "[think]A3;"]
    assert whole[1] == "<user>U;<assistant>A1;<user>V;<assistant>[think]A2;"
    assert found.last_answers_only == 2
    assert any(note.startswith("2 chats of which only the last answer") for note in found.notes(100))


def test_a_template_that_drops_messages_before_an_answer_is_refused(tmp_path: Path) -> None:
    chat = [("system", "S"), ("user", "U"), ("assistant", "A")]
    with pytest.raises(CannotTrain, match=r"line 1 .* put the system message into the user's first message"):
        prepared_chats(tmp_path, LEAVES_OUT_THE_SYSTEM, chat)
    _, _, counted = prepared_chats(tmp_path, LEAVES_OUT_THE_SYSTEM, chat[1:])
    assert counted == ["A;"]
