"""accrue chat: talks to a model in the terminal."""

import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from app.cli.client import Client, ServiceError
from app.cli.options import DEFAULT_URL, Url, without_none
from app.errors import NoChatTemplate, NotFound

commands = typer.Typer()

_COMPLETION_TOKENS = 128


@commands.command()
def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="A model, as accrue models lists it, or a job's id; default: the newest trained model",
            show_default=False,
        ),
    ] = "",
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Send this message, print the answer, and exit")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message, before the conversation")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The longest answer, in tokens; default: 1024, or 128 without the template"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0: always the most probable token")
    ] = None,
    complete: Annotated[
        bool | None,
        typer.Option(
            "--complete/--template",
            help="Complete the message as it is, or render it with the chat template. Default: with the "
            "template if the model was trained on chats (the format `messages`), or if it is a base model "
            "that has one",
            show_default=False,
        ),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Talk to a trained or a base model."""
    with Client(url) as client:
        options = without_none({"max_tokens": max_tokens, "temperature": temperature})
        name = model or _newest_model(client)
        completes = _was_trained_without_template(client, name) if complete is None else complete
        talk = _Talk(client, name, system, options, completes=completes)
        if message is not None:
            talk.say(message)
            return
        typer.echo(f"{talk.model}: an empty line or Ctrl-D ends the chat", err=True)
        while (line := _read_line()) is not None:
            try:
                talk.say(line)
            except ServiceError as error:
                typer.secho(f"accrue: {error}", fg="red", err=True)
            except KeyboardInterrupt:  # ends the answer, not the chat
                typer.echo()


class _Talk:
    """A conversation."""

    def __init__(
        self, client: Client, model: str, system: str | None, options: dict[str, Any], *, completes: bool
    ) -> None:
        self.model = model
        self._client, self._options = client, options
        self._messages: list[dict[str, str]] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        self._completes = completes
        """Whether messages are completed as they are, without the chat template."""
        if completes and system is not None:
            typer.echo(f"--system is not used: {model} completes what you write.", err=True)

    def say(self, text: str) -> None:
        """Prints the answer to a message as it comes, and remembers both."""
        if not self._completes:
            asked = [*self._messages, {"role": "user", "content": text}]
            try:
                answer = _print(self._deltas(asked))
                self._messages = [*asked, {"role": "assistant", "content": answer}]
                return
            except ServiceError as error:
                if error.code != NoChatTemplate.code:
                    raise
            self._completes = True
            ignored = ", and --system is not used" if self._messages else ""
            typer.echo(f"{self.model} has no chat template: it completes what you write{ignored}.", err=True)
        _print(self._completion(text))

    def _deltas(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {"model": self.model, "messages": messages, **self._options}
        for chunk in self._client.chunks("/v1/chat/completions", body):
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or ""

    def _completion(self, prompt: str) -> Iterator[str]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": _COMPLETION_TOKENS, **self._options}
        for chunk in self._client.chunks("/v1/completions", body):
            for choice in chunk["choices"]:
                yield choice["text"]


def _print(parts: Iterator[str]) -> str:
    """Prints parts of a text as they come. Returns the text."""
    text = ""
    for part in parts:
        text += part
        sys.stdout.write(part)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return text


def _read_line() -> str | None:
    """The next line of the user; None if there is none, or an empty one."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # makes input() edit its line
    try:
        return input("> " if sys.stdin.isatty() else "") or None
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None


_JOB_IN_NAME = re.compile(r"(?:ftjob-|ft:.*:)([A-Za-z0-9]+)(?::ckpt-step-[0-9]+)?")


def _was_trained_without_template(client: Client, model: str) -> bool:
    """Whether the model's job trained on a format other than `messages`."""
    found = _JOB_IN_NAME.fullmatch(model)
    if found is None:
        return False
    job = client.get(f"/gradient-accumulation/training/ftjob-{found[1]}")
    return bool(job["dataset"]["format"] != "messages")


def _newest_model(client: Client) -> str:
    trained = [model for model in client.get("/v1/models")["data"] if model["owned_by"] == "accrue"]
    if not trained:
        raise NotFound("there is no trained model yet: accrue submit FILE --watch, or name a base model")
    return str(trained[0]["id"])
