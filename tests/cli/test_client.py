"""The command's HTTP client, and its messages if no service answers."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from app.cli import main, terminal
from app.cli.client import Client, LostConnection, ServiceError, TemporaryError


def test_base_urls_are_accepted_in_the_openai_client_s_form() -> None:
    for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"):
        with Client(url) as client:
            assert str(client._http.base_url).rstrip("/") == "http://127.0.0.1:8000"


@pytest.mark.parametrize("url", ["banana", "127.0.0.1:8000", ""])
def test_an_invalid_address_is_reported(url: str) -> None:
    with pytest.raises(ServiceError, match="ACCRUE_URL"):
        Client(url)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"training_config": {"learning_rate": float("nan")}},
            "config.learning_rate is not a finite",
        ),
        ({"vary": {"seed": [1, float("inf")]}}, "vary.seed.1 is not a finite"),
    ],
)
def test_a_number_that_is_not_finite_is_named(body: dict[str, Any], message: str) -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(ServiceError, match=message):
        client.post("/", body)


class Answering(Client):
    """A client whose service is a function of the requested path."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self._answer = answer

    def get(self, path: str, **kw: Any) -> Any:
        return self._answer(path)


def raising(error: BaseException) -> Callable[[str], Any]:
    def answer(path: str) -> Any:
        raise error

    return answer


PROGRESS = {
    "step": 1,
    "steps_total": 9,
    "loss": 2.0,
    "tokens_per_second": None,
    "eta_seconds": None,
    "within_window": True,
    "accumulation_step": 3,
}


def test_interrupting_watch_reports_that_the_job_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Answering(lambda _: {"status": "running", "waiting": None, "progress": PROGRESS})

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    # only for this module: threads of other tests sleep, too
    monkeypatch.setattr(terminal, "time", SimpleNamespace(sleep=interrupted))
    assert terminal.follow(service, "ftjob-1") == 130
    assert "accrue cancel ftjob-1" in capsys.readouterr().out


def test_watch_says_once_each_time_that_a_job_is_paused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = iter(["running", "paused", "paused", "running", "paused", "cancelled"])
    jobs = ({"status": each, "waiting": None, "progress": PROGRESS, "error": None} for each in statuses)

    def answer(path: str) -> Any:
        return {"data": []} if "events" in path else next(jobs)

    monkeypatch.setattr(terminal, "time", SimpleNamespace(sleep=lambda _: None))
    assert terminal.follow(Answering(answer), "ftjob-1") == 1
    assert capsys.readouterr().out.count("accrue resume ftjob-1 continues it") == 2


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
    [
        (200, {}, "<html>login</html>", "did not answer with JSON"),
        (
            302,
            {"location": "https://login.example/\x1b[2J"},
            "",
            "answered with status 302, a redirect to https://login",
        ),
        (500, {}, '{"detail": "\x1b]0;owned\x07no"}', "answered with status 500"),
        (500, {}, '{"detail": "\\u001b]0;owned\\u0007no"}', "]0;owned"),
        (502, {}, "", "answered with status 502"),
    ],
)
def test_answers_of_other_servers_are_explained(
    status: int, headers: dict[str, str], body: str, message: str
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, text=body)

    client = Client("http://testserver")
    client._http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://testserver")
    calls = [partial(client.get, "/x"), partial(client.post, "/x", {}), lambda: list(client.lines("/x"))]
    for call in calls[: 2 if status == 200 else 3]:
        with pytest.raises(ServiceError) as raised:
            call()
        assert message in str(raised.value)
        assert not set("\x1b\x07") & set(str(raised.value))


class _OtherProgram(BaseHTTPRequestHandler):
    """Answers every request with JSON that is not Accrue's."""

    body = b"{}"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.mark.parametrize("body", [b"{}", b"null", b"[1]", b"[" * 100_000 + b"]" * 100_000])
@pytest.mark.parametrize("command", ["jobs", "files", "gpus", "models", "logs ftjob-1", "watch ftjob-1"])
def test_a_program_that_is_not_accrue_gives_one_line_and_no_traceback(
    command: str, body: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_OtherProgram, "body", body)
    with HTTPServer(("127.0.0.1", 0), _OtherProgram) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("ACCRUE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(sys, "argv", ["accrue", *command.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        server.shutdown()
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    if ended.value.code:  # an answer may also pass as an empty list
        assert ended.value.code == 1
        assert len(shown.err.splitlines()) == 1
        assert "ACCRUE_URL" in shown.err


@pytest.mark.parametrize(
    "command", ["jobs --url http://[::1", "submit /dev/zero --dry-run", "backup /proc/no-such-folder"]
)
def test_unusable_arguments_give_one_line_and_no_traceback(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["accrue", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().err
    assert ended.value.code in (1, 2)
    assert "Traceback" not in shown
    assert shown


@pytest.mark.parametrize("proxy", ["HTTP_PROXY", "ALL_PROXY"])
def test_a_service_on_this_machine_is_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    for url in ("http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"):
        with Client(url) as client:
            assert client._http._transport_for_url(httpx.URL(url)) is client._http._transport
    with Client("http://accrue.example") as client:
        asked = client._http._transport_for_url(httpx.URL("http://accrue.example"))
        assert asked is not client._http._transport


def test_watching_outlives_a_restart_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [LostConnection("no service answers"), TemporaryError("busy"), {"status": "running"}]

    def answer(path: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    slept: list[float] = []
    moment = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr("app.cli.client.time", moment)
    said: list[str] = []
    assert Answering(answer).get_patiently("/job", said.append) == {"status": "running"}
    assert said == ["no service answers (trying again for 5 minutes)"]
    answers += [LostConnection("gone")] * 1000
    with pytest.raises(LostConnection):
        Answering(answer).get_patiently("/job", said.append)
    assert 300 < sum(slept) < 320


def test_a_refusal_is_not_repeated() -> None:
    refusing = Answering(raising(ServiceError("no such job")))
    with pytest.raises(ServiceError, match="no such job"):
        refusing.get_patiently("/job", pytest.fail)


def test_interrupting_a_wait_reports_that_the_job_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted = Answering(raising(KeyboardInterrupt()))
    with pytest.raises(SystemExit) as ended:
        terminal.wait_for(interrupted, "ftjob-1", "measuring", quiet=True)
    assert ended.value.code == 130
    assert "accrue cancel ftjob-1" in capsys.readouterr().err.replace("\n", " ")


def test_a_file_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = tmp_path / "missing" / "losses.png"
    monkeypatch.setattr("app.cli.app", lambda **_: missing.write_bytes(b""))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    shown = "".join(capsys.readouterr().err.split("\n"))
    assert f"{missing}: No such file or directory" in shown
    assert "unexpected" not in shown
