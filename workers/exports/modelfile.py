"""An Ollama Modelfile beside an export, with the chat template in Ollama's language.

Ollama cannot run the Jinja templates of models. Most of them only put fixed texts around each message, which
are found by rendering a few conversations. A Modelfile's template is used only if, put together in that way,
it gives exactly the text of the model's own template for a longer conversation and for those of the samples.
https://docs.ollama.com/modelfile
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.contract.data_formats import Chat, ChatPair
from workers.exports.verify import Sample
from workers.training.data.rendering import Conversation, NotRendered, Renderer

NAME = "Modelfile"
_ENDS_TEXT = '"""'
"""What ends a text in a Modelfile: it cannot be part of one."""
_UNQUOTABLE = set('"\\\r\n')
_ROLES = ("system", "user", "assistant")
_MARKS = ("«first»", "«second»", "«third»", "«fourth»", "«fifth»")
"""Contents of messages that no template contains."""


@dataclass(frozen=True)
class Affixes:
    """The texts that a template puts around messages."""

    begin: str
    around: dict[str, tuple[str, str]]
    """What is before and after a message of each role."""
    opening: str
    """What follows the conversation where an answer begins."""

    def render(self, messages: list[dict[str, Any]]) -> str:
        """A conversation, up to where an answer begins.

        Raises:
            KeyError: a message has a role without affixes.
        """
        texts = [self.around[each["role"]] for each in messages]
        parts = [
            f"{before}{each['content']}{after}" for (before, after), each in zip(texts, messages, strict=True)
        ]
        return self.begin + "".join(parts) + self.opening


def write(folder: Path, tokenizer: Any, samples: list[Sample]) -> list[str]:
    """Writes a Modelfile into an export's folder. Returns notes on it."""
    lines, notes = ["FROM ."], []
    affixes = affixes_of(tokenizer, samples)
    if affixes is not None and _ENDS_TEXT not in (text := _in_ollamas_language(affixes)):
        lines.append(f"TEMPLATE {_ENDS_TEXT}{text}{_ENDS_TEXT}")
    elif tokenizer.chat_template:
        notes.append(
            "The Modelfile has no template, because the model's chat template does more than put fixed texts "
            "around messages. Chats in Ollama work correctly only if Ollama already has a template for this "
            "model; otherwise add a TEMPLATE yourself."
        )
    stop = tokenizer.eos_token
    ends = dict.fromkeys([stop, *([affixes.around["assistant"][1].strip()] if affixes else [])])
    lines += [f'PARAMETER stop "{end}"' for end in ends if end and not _UNQUOTABLE & set(end)]
    (folder / NAME).write_text("\n".join(lines) + "\n")
    return notes


def affixes_of(tokenizer: Any, samples: list[Sample]) -> Affixes | None:
    """The template's affixes; None if it has none, or if it is not made of them."""
    if not isinstance(tokenizer.chat_template, str):
        return None
    renderer = Renderer(tokenizer.chat_template, tokenizer.special_tokens_map)
    try:
        found = _found(renderer)
        if found is None:
            return None
        turns = zip(("user", "assistant") * 3, _MARKS[:5], strict=False)
        conversations = [[{"role": role, "content": mark} for role, mark in turns]]
        conversations += [messages for sample in samples if (messages := _prompt_of(sample))]
        rendered = renderer.render([Conversation(each, [(len(each), True)]) for each in conversations])
        alike = all(
            found.render(messages) == text for messages, (text,) in zip(conversations, rendered, strict=True)
        )
    except (NotRendered, KeyError):
        return None
    finally:
        renderer.close()
    return found if alike else None


def _prompt_of(sample: Sample) -> list[dict[str, Any]]:
    """The conversation before a sample's last answer; empty if the sample is no plain chat."""
    example = sample.example
    if isinstance(example, ChatPair):
        messages = list(example.messages)
    elif isinstance(example, Chat):
        last = max(number for number, each in enumerate(example.messages) if each.role == "assistant")
        messages = example.messages[:last]
    else:
        return []
    if example.tools or any(each.role not in _ROLES or each.tool_calls for each in messages):
        return []
    return [each.for_template() for each in messages]


def _found(renderer: Renderer) -> Affixes | None:
    """The affixes as conversations of one and of three turns show them, with those of a system message; None
    if these do not agree."""

    def of(roles: tuple[str, ...]) -> str:
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=False)]
        ((text,),) = renderer.render([Conversation(turns, [(len(turns), True)])])
        return text

    user, longer = of(("user",)), of(("user", "assistant", "user"))
    first, second, third = _MARKS[:3]
    if user.count(first) != 1 or any(longer.count(mark) != 1 for mark in (first, second, third)):
        return None
    head, tail = user.split(first)
    middle, rest = longer.split(second)
    if not middle.startswith(head + first) or not rest.endswith(third + tail):
        return None
    between, again = middle.removeprefix(head + first), rest.removesuffix(third + tail)
    found = []
    for cut in range(len(head) + 1):
        begin, before_user = head[:cut], head[cut:]
        if not again.endswith(before_user):
            continue
        after_assistant = again.removesuffix(before_user)
        for end in range(len(tail) + 1):
            if not between.startswith(tail[:end]):
                break
            after_user, opening, before_assistant = tail[:end], tail[end:], between[end:]
            around = {"user": (before_user, after_user), "assistant": (before_assistant, after_assistant)}
            found.append(Affixes(begin, around, opening))
    if not found:
        return None
    # Several divisions give the same text if turns alternate. Most templates end each turn in the same way.
    alike = (each for each in found if each.around["user"][1] == each.around["assistant"][1])
    ended = [each for each in found if each.around["assistant"][1]] or found
    shortest = [each for each in ended if each.begin == ended[0].begin]
    return _with_system(renderer, next(alike, shortest[-1]), user)


def _with_system(renderer: Renderer, affixes: Affixes, user: str) -> Affixes | None:
    """The affixes with those of a system message, if the template has a place for one; None if that changes
    other texts."""
    turns = [{"role": "system", "content": _MARKS[3]}, {"role": "user", "content": _MARKS[0]}]
    try:
        ((text,),) = renderer.render([Conversation(turns, [(2, True)])])
    except NotRendered:
        return affixes
    rest = user.removeprefix(affixes.begin)
    if _MARKS[3] not in text:
        return affixes
    if text.count(_MARKS[3]) != 1 or not text.startswith(affixes.begin) or not text.endswith(rest):
        return None  # for example, because it replaces a default system message
    before, after = text.removeprefix(affixes.begin).removesuffix(rest).split(_MARKS[3])
    return Affixes(affixes.begin, {**affixes.around, "system": (before, after)}, affixes.opening)


def _in_ollamas_language(affixes: Affixes) -> str:
    """A Go template (https://pkg.go.dev/text/template) with the same texts."""
    turns = []
    for number, (role, (before, after)) in enumerate(affixes.around.items()):
        condition = f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}'
        turns.append(f"{condition}{_literal(before)}{{{{ .Content }}}}{_literal(after)}")
    loop = "{{ range .Messages }}" + "".join(turns) + "{{ end }}{{ end }}"
    return f"{_literal(affixes.begin)}{loop}{_literal(affixes.opening)}"


def _literal(text: str) -> str:
    """A text that Go's template language copies."""
    return text.replace("{", '{{ "{" }}')
