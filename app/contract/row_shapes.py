"""The shapes of samples that are recognised, and how each becomes a line of one of our formats.

Public datasets use a few common shapes: chats as OpenAI, ShareGPT or TRL write them, and instructions as
Alpaca or Dolly write them. Uses only the standard library.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip
"""ShareGPT's names of speakers."""

_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")
"""The names in Alpaca's and Dolly's datasets."""


ColumnField = Literal[
    "text", "prompt", "completion", "messages", "conversations", "instruction", "input", "output", "system",
    "tools", "weight",
]  # fmt: skip
"""The fields that a column can be assigned to."""


_BELONGING: dict[str, tuple[str, ...]] = {
    "messages": ("tools", "functions"),
    "conversations": ("tools", "system"),
    "instruction": ("input", "context", "system", "history"),
}
"""Fields that belong to others, and are read with them."""


class BadShape(ValueError):
    """A row that has no recognised shape, or a wrong value in one; the message says why."""


def mapped(row: Mapping[str, Any], columns: Mapping[ColumnField, str]) -> dict[str, Any]:
    """The fields of a row, taken from the columns that were assigned to them. Fields that accompany them (the
    weight, a chat's tools, an instruction's input) are kept if they have their usual names.

    Args:
        columns: maps our fields to the row's columns.

    Raises:
        BadShape: the row has no such column.
    """
    missing = sorted(set(columns.values()) - row.keys())
    if missing:
        raise BadShape(f"has no column {missing[0]!r:.120}; it has {_names(row)}")
    belonging = {"weight"}.union(*(_BELONGING.get(field, ()) for field in columns))
    if columns.keys() & set(_INPUTS):
        belonging -= set(_INPUTS)
    kept = {name: row[name] for name in sorted(belonging) if name in row and name not in columns.values()}
    return {**kept, **{field: row[column] for field, column in columns.items()}}


def canonical(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the keys of one of our formats: `messages`, `prompt` and `completion`, or `text`. Other
    keys are kept, and a row of no known shape is returned unchanged.

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
    if "messages" in found:
        found["messages"] = _turns(_decoded(found["messages"], "messages"), "messages")
    elif "conversations" in found:
        turns = _turns(_decoded(found.pop("conversations"), "conversations"), "conversations")
        found["messages"] = _with_system(found, turns)
    elif _is_list(found.get("prompt")) and _is_list(found.get("completion")):
        found["messages"] = _asked_and_answered(found)
    elif "instruction" in found and (output := _first(found, _OUTPUTS)) is not None:
        found["messages"] = _of_instruction(found, output)
    if "messages" in found:
        _add_tools(found)
    return found


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
        for optional in ("weight", "name", "tool_calls", "tool_call_id", "reasoning_content"):
            if turn.get(optional, 1) is None:
                del turn[optional]
        if turn.get("tool_calls") and turn.get("content") is None:
            turn["content"] = ""
        made.append(turn)
    return made


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
    system = row.pop("system", None)
    starts = bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") == "system"
    return turns if not system or starts else [{"role": "system", "content": system}, *turns]


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
