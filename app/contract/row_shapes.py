"""The shapes of samples that are recognised, and how each becomes a line of one of our formats.

Public datasets use a few common shapes: chats and preferences as OpenAI, ShareGPT or TRL write them, and
instructions as Alpaca or Dolly write them. Uses only the standard library.
"""

import json
from collections.abc import Mapping, Set
from typing import Any, Literal

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip
"""ShareGPT's names of speakers."""

REASONING = ("thinking", "reasoning")
"""Other names of an answer's `reasoning_content`: in gpt-oss's data, and in the answers of some services."""

_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")
"""The names in Alpaca's and Dolly's datasets."""


ColumnField = Literal[
    "text", "prompt", "completion", "messages", "conversations", "instruction", "input", "output", "system",
    "tools", "weight", "chosen", "rejected", "label",
]  # fmt: skip
"""The fields that a column can be assigned to."""


_OF_CHATS = {"tools", "functions", "system"}
_PAIR = {"chosen", "rejected"}
_QUESTIONS = ({"prompt"}, {"messages"}, {"conversations"}, {"instruction", *_INPUTS, "history"})
_TOGETHER: tuple[Set[str], ...] = (
    {"text"},
    {"prompt", "completion", *_OF_CHATS},
    {"messages", *_OF_CHATS},
    {"conversations", *_OF_CHATS},
    {"instruction", *_INPUTS, "history", *_OF_CHATS, *_OUTPUTS},
    *({*question, *_OF_CHATS, *_PAIR} for question in _QUESTIONS),
)
"""The fields that a sample of each shape may have, besides its weight and its label."""


class BadShape(ValueError):
    """A row that has no recognised shape, or a wrong value in one; the message says why."""


def mapped(row: Mapping[str, Any], columns: Mapping[ColumnField, str]) -> dict[str, Any]:
    """The fields of a row, taken from the columns that were assigned to them. Fields that accompany them (the
    weight, a chat's tools, an instruction's input) are kept if they have their usual names, and so are those
    without which they would be no sample (a prompt's answer, an answer's prompt).

    Args:
        columns: maps our fields to the row's columns.

    Raises:
        BadShape: the row has no such column.
    """
    missing = sorted(set(columns.values()) - row.keys())
    if missing:
        raise BadShape(f"has no column {missing[0]!r:.120}; it has {_names(row)}")
    belonging = _kept_beside(columns.keys())
    kept = {name: row[name] for name in sorted(belonging) if name in row and name not in columns.values()}
    return {**kept, **{field: row[column] for field, column in columns.items()}}


def _kept_beside(assigned: Set[str]) -> set[str]:
    """The fields that are kept beside those to which columns are assigned, if a row has them: those of the
    shapes that have all assigned fields. A chat to which a column is assigned is a sample by itself, so no
    pair of answers is kept beside it."""
    named = assigned - {"weight", "label"}
    shapes = [fields for fields in _TOGETHER if named <= fields]
    if named & {"messages", "conversations"} and not named & _PAIR:
        shapes = [fields for fields in shapes if not fields & _PAIR]
    found = {"weight"}.union(*shapes)
    for alternatives in (_INPUTS, _OUTPUTS):
        if assigned & set(alternatives):
            found -= set(alternatives)
    return found


def canonical(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the keys of one of our formats: `messages`, `prompt` and `completion`, or `text`; for a
    preference, `messages` or `prompt` with `chosen` and `rejected`. Other keys are kept, and a row of no
    known shape is returned unchanged.

    >>> canonical({"instruction": "Add.", "input": "1 + 1", "output": "2"})["messages"][0]["content"]
    'Add.\\n\\n1 + 1'

    Raises:
        BadShape: a value is not what the shape needs.
    """
    found = dict(row)
    if found.get("weight", 1) in (None, ""):  # an empty cell
        del found["weight"]
    if found.get("messages", 1) is None and ("text" in found or "prompt" in found):
        del found["messages"]  # an empty cell
    is_answer = "text" not in found  # a text's label is the name of its class
    if is_answer and (label := str(found.get("label")).strip().lower()) in ("true", "false"):
        found["label"] = label == "true"  # CSV has only text
    if "preferred_output" in found and "non_preferred_output" in found:
        _of_openai_preference(found)
    if "chosen" in found and "rejected" in found:
        _of_pair(found)
        return found
    if "messages" in found:
        turns = _turns(_decoded(found["messages"], "messages"), "messages")
        found["messages"] = _with_system(found, turns)
    elif "conversations" in found:
        turns = _turns(_decoded(found.pop("conversations"), "conversations"), "conversations")
        found["messages"] = _with_system(found, turns)
    elif _is_list(found.get("prompt")) and _is_list(found.get("completion")):
        found["messages"] = _with_system(found, _asked_and_answered(found))
    elif "instruction" in found and (output := _first(found, _OUTPUTS)) is not None:
        found["messages"] = _of_instruction(found, output)
    if "messages" in found:
        _add_tools(found)
    return found


def _of_openai_preference(row: dict[str, Any]) -> None:
    """OpenAI's preference format: `input` holds the chat so far and its tools."""
    given = row.pop("input", None)
    if not isinstance(given, dict) or not _is_list(given.get("messages")):
        raise BadShape("input is not an object with messages")
    row["messages"], row["tools"] = given["messages"], given.get("tools")
    row["chosen"], row["rejected"] = row.pop("preferred_output"), row.pop("non_preferred_output")


def _of_pair(row: dict[str, Any]) -> None:
    """A pair becomes `prompt`, `chosen` and `rejected` as text, or `messages` and both as lists of turns. If
    no prompt is given apart from both answers, it is what these have in common at their beginning."""
    chosen, rejected = (_answer(row.pop(name), name) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        prompt = row.pop("prompt", None)
        turns = _prompt_turns(row) if prompt is None else None
        if turns is not None:
            row["messages"] = turns
            chosen, rejected = ([{"role": "assistant", "content": each}] for each in (chosen, rejected))
        elif prompt is None:
            row["prompt"], chosen, rejected = _common_text(chosen, rejected)
        elif _is_list(prompt):
            row["messages"] = _turns(prompt, "prompt")
            chosen, rejected = ([{"role": "assistant", "content": each}] for each in (chosen, rejected))
        else:
            row["prompt"] = prompt
    elif _is_list(chosen) and _is_list(rejected):
        common = _common_turns(chosen, rejected)
        prompt = row.pop("prompt", None)
        before = _prompt_turns(row)
        if before is None and _is_list(prompt):
            before = _turns(prompt, "prompt")
        shared, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
        if before is None:  # a prompt as text is, in such datasets, also the first of the shared turns
            before = shared or _as_user_turn(prompt)
        elif _is_same_beginning(before, shared) or shared[len(shared) - len(before) :] == before:
            before = shared
        elif shared != before[len(before) - len(shared) :]:
            before = [*before, *shared]
        row["messages"] = before
    else:
        raise BadShape("chosen and rejected are not both text, or both lists of messages")
    row["chosen"], row["rejected"] = chosen, rejected
    if "messages" in row:
        row["messages"] = _with_system(row, row["messages"])
        _add_tools(row)


def _answer(value: Any, name: str) -> Any:
    """One answer of a pair: text, or turns; a single turn may stand alone."""
    if isinstance(value, dict):
        value = [value]
    return _turns(value, name) if _is_list(value) else value


def _prompt_turns(row: dict[str, Any]) -> list[Any] | None:
    """The chat before both answers, if the row holds one; it is taken from the row."""
    if "messages" in row:
        return _turns(_decoded(row.pop("messages"), "messages"), "messages")
    if "conversations" in row:
        return _with_system(row, _turns(_decoded(row.pop("conversations"), "conversations"), "conversations"))
    if "instruction" in row:
        row["output"] = ""
        return _of_instruction(row, "output")[:-1]
    return None


def _as_user_turn(prompt: Any) -> list[Any]:
    if not isinstance(prompt, str):
        raise BadShape("has no prompt: expected prompt or messages beside chosen and rejected")
    return [{"role": "user", "content": prompt}]


def _is_same_beginning(before: list[Any], shared: list[Any]) -> bool:
    """Whether whole conversations were given beside their beginning: both begin in the same way."""
    length = min(len(before), len(shared))
    return length > 0 and before[:length] == shared[:length]


def _common_turns(chosen: list[Any], rejected: list[Any]) -> int:
    """The number of turns at the beginning that both answers have in common."""
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    return common


def _common_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The text that both answers begin with, to the end of a word; and what remains of each."""
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    while common and not chosen[common - 1].isspace() and chosen[common - 1] != ":":
        common -= 1
    while common and chosen[common - 1].isspace():
        common -= 1  # an answer keeps the space before it, as tokenizers expect
    return chosen[:common], chosen[common:], rejected[common:]


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(ascii(str(key)[:100]) for key in sorted(row, key=str)[:8]) or "none"


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in row), None)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _decoded(value: Any, name: str) -> Any:
    """A list, which a CSV file has as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadShape(f"{name} is a string that is not valid JSON: expected a list") from None
    if not isinstance(value, list):
        raise BadShape(f"{name} is not a list")
    return value


def _turns(messages: list[Any], name: str) -> list[Any]:
    """Messages with `role` and `content`, which is text."""
    made = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadShape(f"{name}.{number} is not an object")
        turn = dict(message)
        if "from" in turn and "value" in turn and "role" not in turn:
            _rename_sharegpt(turn, f"{name}.{number}")
        if turn.get("role") == "function":
            turn["role"] = "tool"
        older = turn.pop("function_call", None)
        if isinstance(older, dict) and not turn.get("tool_calls"):
            turn["tool_calls"] = [{"type": "function", "function": older}]
            turn.setdefault("content", None)
        if "content" in turn:
            turn["content"] = _text_of(turn["content"], f"{name}.{number}.content")
        if isinstance(turn.get("tool_calls"), str):
            turn["tool_calls"] = _named(turn["tool_calls"], f"{name}.{number}.tool_calls") or None
        if _is_list(turn.get("tool_calls")):
            turn["tool_calls"] = [_with_arguments(call) for call in turn["tool_calls"]]
        _rename_reasoning(turn)
        for optional in ("weight", "name", "tool_calls", "tool_call_id", "reasoning_content"):
            if turn.get(optional, 1) is None:
                del turn[optional]
        if turn.get("tool_calls") and turn.get("content") is None:
            turn["content"] = ""
        made.append(turn)
    return made


def _rename_reasoning(turn: dict[str, Any]) -> None:
    """An answer's reasoning, whose names differ, under the name that transformers passes to all templates."""
    for name in REASONING:
        if isinstance(turn.get(name), str) or turn.get(name, 1) is None:
            reasoning = turn.pop(name)
            if reasoning is not None and turn.get("reasoning_content") is None:
                turn["reasoning_content"] = reasoning


def _rename_sharegpt(turn: dict[str, Any], where: str) -> None:
    speaker, said = turn.pop("from"), turn.pop("value")
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join(sorted(_SHAREGPT_ROLES))
        raise BadShape(f"{where}.from is {speaker!r:.50}: expected one of {known}")
    if role == "function_call":
        turn |= {"role": "assistant", "content": "", "tool_calls": _calls(said, where)}
    else:
        turn |= {"role": role, "content": said}


def _calls(said: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls that ShareGPT writes as JSON: `{"name": …, "arguments": {…}}`, or a list of such objects."""
    try:
        calls = json.loads(said) if isinstance(said, str) else said
    except (ValueError, RecursionError):
        raise BadShape(f"{where}.value is not valid JSON, as a function_call must be") from None
    calls = calls if _is_list(calls) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadShape(f"{where}.value has no name of a function")
    made = []
    for call in calls:
        arguments: Any = next((call[name] for name in ("arguments", "parameters") if name in call), {})
        function = {"name": call["name"], "arguments": arguments}
        made.append(_with_arguments({"type": "function", "function": function}))
    return made


def _text_of(content: Any, where: str) -> Any:
    """The text of a message whose content is a list of parts, as in OpenAI's format."""
    if not isinstance(content, list):
        return content
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadShape(f"{where}.{number} is of type {kind!r:.50}: only text can be trained on")
        texts.append(part["text"])
    return "".join(texts)


def _with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object: OpenAI's format has them as JSON text, which chat
    templates would write with escaped quotation marks."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _with_system(row: dict[str, Any], turns: list[Any]) -> list[Any]:
    """The messages, after the row's `system` text if it has one."""
    if not isinstance(row.get("system", ""), str):
        return turns  # the column means something else
    system = row.pop("system", "")
    starts = bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") in ("system", "developer")
    return turns if not system.strip() or starts else [{"role": "system", "content": system}, *turns]


def _asked_and_answered(row: dict[str, Any]) -> list[Any]:
    """The messages of TRL's conversational prompts and completions: only the completion is learned."""
    asked = [
        {**turn, "weight": 0} if turn.get("role") == "assistant" else turn
        for turn in _turns(row.pop("prompt"), "prompt")
    ]
    return [*asked, *_turns(row.pop("completion"), "completion")]


def _of_instruction(row: dict[str, Any], output: str) -> list[Any]:
    """The chat that an instruction in Alpaca's or Dolly's shape means: the earlier turns of `history` are
    context; the answer is learned."""
    instruction, answer = row.pop("instruction"), row.pop(output)
    name = _first(row, _INPUTS)
    given = row.pop(name) if name is not None else None
    for field, value in (("instruction", instruction), (name, given)):
        if value is not None and not isinstance(value, str):
            raise BadShape(f"{field} is not a string")
    turns: list[Any] = []
    history = row.pop("history", None) or []
    history = _decoded(history, "history") if isinstance(history, str) else history
    if not isinstance(history, list) or not all(_is_list(pair) and len(pair) == 2 for pair in history):
        raise BadShape("history is not a list of pairs of an instruction and its answer")
    for earlier, reply in history:
        turns += [
            {"role": "user", "content": earlier},
            {"role": "assistant", "content": reply, "weight": 0},
        ]
    asked = "\n\n".join(part for part in (instruction, given) if part)
    turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return _with_system(row, turns)


def _add_tools(row: dict[str, Any]) -> None:
    """The tools that a chat may use, also in OpenAI's older form (`functions`), or as JSON text."""
    tools, functions = (_named(row.pop(name, None), name) for name in ("tools", "functions"))
    tools = tools or [{"type": "function", "function": function} for function in functions]
    if tools:  # a template may announce tools even if the list is empty
        row["tools"] = tools


def _named(value: Any, name: str) -> list[Any]:
    """A list that may be left out, or be JSON text."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return []
    named: list[Any] = _decoded(value, name)
    return named
