"""The command's HTTP client, whose errors are one-sentence messages."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx2 as httpx

NO_CONTENT = 204
_UNSAFE_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and characters that change the direction of text."""
_EXAMPLE = "http://127.0.0.1:8000"
_MAX_RECONNECTS = 5
"""Reconnection attempts in a row; each waits a second longer than the one before."""
_RESTART_SECONDS, _SECONDS_BETWEEN_TRIES = 300.0, 2.0
"""How long a service may take to restart while a command follows a job, and how often it is tried."""
_TOO_MANY_REQUESTS, _SERVER_ERRORS = 429, 500
"""The status of the answer to a client that sends too many requests, and the lowest of the statuses that mean
that the service itself has failed."""


class ServiceError(Exception):
    """The service returned an error or could not be reached; the message says what to do.

    Args:
        code: the service's code of the error.
    """

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class TemporaryError(ServiceError):
    """The service cannot answer now; the same request may succeed soon."""


class LostConnection(TemporaryError):
    """The service cannot be reached, or the connection broke."""


class Client:
    """Calls one service, with the key in ACCRUE_API_KEY if it is set."""

    def __init__(self, url: str, timeout_seconds: float = 60.0) -> None:
        import httpx2 as httpx

        url = url.rstrip("/").removesuffix("/v1")  # the openai client's base URL works, too
        if not url.startswith(("http://", "https://")):
            raise ServiceError(
                f"{url!r} is not the address of a service (--url or ACCRUE_URL): use one like {_EXAMPLE}"
            )
        key = os.environ.get("ACCRUE_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else None
        # A proxy of the environment cannot reach this machine.
        direct = dict.fromkeys(("http://", "https://", "all://")) if _is_this_machine(url) else {}
        self._http = httpx.Client(base_url=url, timeout=timeout_seconds, headers=headers, mounts=direct)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **kw: Any) -> Any:
        return _json_of(self._ask("GET", path, **kw))

    def get_patiently(self, path: str, notify: Callable[[str], None]) -> Any:
        """What `get` returns; tries again for some minutes if the service cannot answer, as when it restarts.

        Args:
            notify: gets a sentence that says so, once.

        Raises:
            ServiceError: it refuses, or still cannot answer.
        """
        until = None
        while True:
            try:
                return self.get(path)
            except TemporaryError as error:
                if until is None:
                    until = time.monotonic() + _RESTART_SECONDS
                    notify(f"{error} (trying again for {_RESTART_SECONDS / 60:.0f} minutes)")
                if time.monotonic() > until:
                    raise
            time.sleep(_SECONDS_BETWEEN_TRIES)

    def post(self, path: str, body: Any) -> Any:
        try:
            answer = self._ask("POST", path, json=body)
        except ValueError as error:  # NaN or infinity, which JSON cannot represent
            field = _not_finite(body)
            raise ServiceError(f"{field} is not a finite number" if field else str(error)) from None
        return _json_of(answer)

    def delete(self, path: str) -> None:
        self._ask("DELETE", path)

    def content(self, path: str, **kw: Any) -> bytes:
        """The raw body of an answer."""
        return self._ask("GET", path, **kw).content

    @contextmanager
    def stream(self, path: str, method: str = "GET", **kw: Any) -> Iterator["httpx.Response"]:
        """An answer whose body is streamed, without a timeout."""
        with _connection_errors(self._http), self._http.stream(method, path, timeout=None, **kw) as answer:
            if not answer.is_success:
                answer.read()
                raise ServiceError(_detail(answer), code=_code(answer))
            yield answer

    def chunks(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The chunks of an answer of a model.

        Raises:
            ServiceError: there is no answer, or it broke off.
        """
        with self.stream(path, "POST", json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name != "data" or value == "[DONE]":
                    continue
                chunk = printable(json.loads(value))
                if "error" in chunk:
                    raise ServiceError(str(chunk["error"]["message"]), code=str(chunk["error"]["code"]))
                yield chunk

    def lines(self, path: str) -> Iterator[str]:
        """An answer line by line."""
        with self.stream(path) as answer:
            for line in answer.iter_lines():
                yield printable(line)

    def events(self, path: str) -> Iterator[dict[str, Any]]:
        """Server-sent events until the stream ends; resumes with the next event after a lost connection."""
        last, failures = "", 0
        while True:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": last}
            try:
                with self.stream(path, headers=headers) as answer:
                    if answer.status_code == NO_CONTENT:
                        return
                    for event_id, data in _parse_events(answer.iter_lines()):
                        last, failures = event_id, 0
                        yield printable(json.loads(data))
            except LostConnection:
                failures += 1
                if failures > _MAX_RECONNECTS:
                    raise
                time.sleep(failures)

    def find_uploaded(self, file: Path) -> Any:
        """An uploaded file with the same name and content, of the newest 100; None if there is none."""
        with file.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        newest = self.get("/v1/files", params={"limit": 100, "purpose": "fine-tune"})["data"]
        same = (each for each in newest if (each["sha256"], each["filename"]) == (sha256, file.name))
        return next(same, None)

    def upload(self, file: Path, columns: dict[str, str] | None = None, sample_by: str | None = None) -> Any:
        """Uploads a file; on a terminal, shows the progress.

        Args:
            columns: maps fields to the file's columns.
            sample_by: what becomes one sample of a plain text file.
        """
        from app.cli.progress import uploading

        fields = {"purpose": "fine-tune", "columns": json.dumps(columns) if columns else None}
        fields["sample_by"] = sample_by
        with file.open("rb") as content, uploading(file.name, file.stat().st_size, content) as shown:
            answer = self._ask(
                "POST", "/v1/files", files={"file": (file.name, shown)},
                data={name: value for name, value in fields.items() if value is not None}, timeout=None,
            )  # fmt: skip
        return _json_of(answer)

    def _ask(self, method: str, path: str, **kw: Any) -> "httpx.Response":
        with _connection_errors(self._http):
            answer = self._http.request(method, path, **kw)
        if not answer.is_success:
            is_temporary = answer.status_code >= _SERVER_ERRORS or answer.status_code == _TOO_MANY_REQUESTS
            raise (TemporaryError if is_temporary else ServiceError)(_detail(answer))
        return answer


def _is_this_machine(url: str) -> bool:
    """Whether an address is one of this machine's loopback addresses."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@contextmanager
def _connection_errors(http: "httpx.Client") -> Iterator[None]:
    """Turns errors of the connection into `LostConnection`.

    Raises:
        LostConnection: the service cannot be reached, or the connection broke.
    """
    import httpx2 as httpx

    try:
        yield
    except httpx.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            why = str(error).partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or "unknown"
            raise LostConnection(f"the certificate of {http.base_url} cannot be verified: {why}") from None
        if "SSL" in str(error):
            raise LostConnection(
                f"{http.base_url} does not answer in https: if it is a service without TLS, use http://"
            ) from None
        raise LostConnection(
            f"no service answers at {http.base_url}: start one with accrue up, or set --url"
        ) from None
    except httpx.HTTPError as error:
        raise LostConnection(f"{http.base_url}: {error}") from None


def _parse_events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """The id and the data of each server-sent event."""
    event: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if line:
            event[name] = value.removeprefix(" ")
        else:
            if "id" in event and "data" in event:  # otherwise a comment, or a progress event, which has no id
                yield event["id"], event["data"]
            event = {}


def printable(answer: Any) -> Any:
    """An answer with its unsafe characters replaced, such as escape sequences in a file's name."""
    if isinstance(answer, str):
        return _UNSAFE_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", answer)
    if isinstance(answer, dict):
        return {printable(name): printable(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [printable(each) for each in answer]
    return answer


def _detail(answer: "httpx.Response") -> str:
    try:
        return str(printable(answer.json()["detail"]))
    except (ValueError, KeyError, TypeError):
        where = printable(f", a redirect to {answer.headers['location']}") if answer.is_redirect else ""
        return f"{answer.url.copy_with(query=None)} answered with status {answer.status_code}{where}"


def _code(answer: "httpx.Response") -> str | None:
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


def _not_finite(value: Any) -> str | None:
    """The dotted path to the first number in a nested value that is not finite; None if there is none."""
    if not isinstance(value, dict | list):
        return None
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, float) and not isfinite(each):
            return str(name)
        if (inner := _not_finite(each)) is not None:
            return f"{name}.{inner}"
    return None


def _json_of(answer: "httpx.Response") -> Any:
    """The answer's JSON, with unsafe characters replaced.

    Raises:
        ServiceError: it is not JSON; it may be the login page of a proxy.
    """
    try:
        return printable(answer.json())
    except ValueError:
        raise ServiceError(
            f"{answer.url.copy_with(query=None)} did not answer with JSON: is it the address of Accrue "
            "(--url or ACCRUE_URL)?"
        ) from None
