"""Renders chat templates in a separate process.

A template is a program that comes with a model: it may run forever, fill the memory, or put what it
reads into its errors. The child has no secrets in its environment, little memory, and a few seconds of
processor time for each conversation; only the type of its errors is reported.

`python -m workers.training.data.rendering` is the child: a line of JSON in, a line of JSON out.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from workers.training.processes.filesystem_view import drop_capabilities
from workers.training.processes.limits import limit_memory

CPU_SECONDS = 5
"""The limit of processor time for one conversation."""

MEMORY_BYTES = 2**30
"""The child's memory limit, in addition to what its libraries take."""
_BATCH_CHARACTERS = 2**18
MAX_CHARACTERS = 64 * 2**20
"""The maximum number of rendered characters of one conversation, over all of its prefixes."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and which prefixes of them are rendered."""

    messages: list[dict[str, Any]]
    prefixes: list[tuple[int, bool]]
    """For each: the number of messages, and whether the opening of an answer follows them."""
    tools: list[dict[str, Any]] | None = None
    """The functions that the assistant may call, as JSON schemas."""


class NotRendered(Exception):
    """A conversation that the template cannot render; the message says why.

    Args:
        number: the conversation's place among those that were requested, from 0.
    """

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


def _batches(conversations: Sequence[Conversation]) -> Iterator[tuple[int, int]]:
    """Ranges of conversations that are rendered at once: larger ranges need fewer exchanges with the
    child."""
    first = size = 0
    for number, conversation in enumerate(conversations):
        size += sum(len(str(message.get("content", ""))) for message in conversation.messages)
        if size > _BATCH_CHARACTERS or number + 1 == len(conversations):
            yield first, number + 1
            first, size = number + 1, 0


def _texts_of(number: int, answer: dict[str, Any] | None) -> list[str]:
    """The texts of an answer.

    Raises:
        NotRendered: there is none, or it says why not.
    """
    if answer is None:
        raise NotRendered(
            number,
            f"the model's chat template took more than {CPU_SECONDS} s or {MEMORY_BYTES // 2**20} MiB for "
            "one conversation: use prompt and completion instead, or a model with a simpler template",
        )
    if "error" in answer and answer["error"].startswith(("TemplateSyntaxError", "TemplateAssertionError")):
        raise NotRendered(
            number,
            f"the model's chat template is no valid template ({answer['error']}): correct it (in "
            "chat_template.jinja or tokenizer_config.json), or use prompt and completion instead",
        )
    if "error" in answer:
        raise NotRendered(
            number,
            f"the model's chat template rejects this conversation ({answer['error']}): check the order and "
            "the roles of its messages, or use prompt and completion instead",
        )
    texts: list[str] = answer["texts"]
    return texts


class Renderer:
    """Renders conversations with one template; the child starts with the first of them.

    Args:
        template: the model's chat template.
        special_tokens: `bos_token` and the like, as the template sees them.
    """

    def __init__(self, template: str, special_tokens: dict[str, str]) -> None:
        self._template, self._special_tokens = template, special_tokens
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, conversations: Sequence[Conversation]) -> list[list[str]]:
        """Renders conversations, each for its own prefixes.

        Raises:
            NotRendered: the template takes too long, too much memory, or raises. The message contains nothing
                of the conversation that the template does not contain as a string.
        """
        made: list[list[str]] = []
        for first, last in _batches(conversations):
            answers = self._answers(conversations[first:last])
            for number in range(first, last):
                # If the child was ended, the conversation that did it is found one by one.
                own = answers[number - first : number - first + 1] if answers is not None else None
                own = self._answers(conversations[number : number + 1]) if own is None else own
                made.append(_texts_of(number, own[0] if own else None))
        return made

    def _answers(self, conversations: Sequence[Conversation]) -> list[dict[str, Any]] | None:
        """The child's answer for each conversation; None if it was ended by one of its limits."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            requested = [vars(conversation) for conversation in conversations]
            process.stdin.write(json.dumps(requested).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            self.close()
            return None
        answers: list[dict[str, Any]] = json.loads(answer)
        return answers

    def close(self) -> None:
        """Ends the child."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        passed = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH")
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE_PREFIX}workers.training.data.rendering"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in passed if name in os.environ}
            | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            cwd=PACKAGES_FOLDER,
        )
        assert self._process.stdin is not None
        first = {"template": self._template, "special_tokens": self._special_tokens}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(first).encode() + b"\n")
        return self._process


_LONGEST_REASON = 200
"""The most characters of a template's message that are shown."""


def main() -> None:
    """Runs the child, until its standard input ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_memory(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    drop_capabilities()  # again: starting a program makes the process open to inspection again
    first = json.loads(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        answers = [_answer(render_jinja_template, first, each) for each in json.loads(line)]
        sys.stdout.buffer.write(json.dumps(answers).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(render: Any, first: dict[str, Any], requested: dict[str, Any]) -> dict[str, Any]:
    _limit_time()
    try:
        return {"texts": _texts(render, first, requested)}
    except Exception as error:  # a template may raise anything
        return {"error": _reason(error, first["template"])}


def _reason(error: Exception, template: str) -> str:
    """Why a template rejects a conversation: its message if that is a string of the template itself, since
    any other may be training text; else the kind of the error."""
    message = str(error)
    is_literal = len(message) <= _LONGEST_REASON and any(f"{q}{message}{q}" in template for q in "'\"")
    return f'"{message}"' if message.isprintable() and message and is_literal else type(error).__name__


def _texts(render: Any, first: dict[str, Any], requested: dict[str, Any]) -> list[str]:
    texts: list[str] = []
    for count, opens in requested["prefixes"]:
        rendered, _ = render(
            conversations=[requested["messages"][:count]],
            tools=requested["tools"],
            chat_template=first["template"],
            add_generation_prompt=opens,
            **first["special_tokens"],
        )
        texts.append(str(rendered[0]))
        if sum(map(len, texts)) > MAX_CHARACTERS:
            raise OverflowError
    return texts


def _limit_time() -> None:
    """Sets a time limit for a conversation; the kernel kills this process if it takes longer.

    The hard limit stays as it is inherited, such as that of a preview: without capabilities, a process may
    not raise it.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


if __name__ == "__main__":
    main()
