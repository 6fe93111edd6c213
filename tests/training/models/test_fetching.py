"""A separate process downloads a hub model with the token; the trainer cannot use the token or write to the
hub's cache.
"""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.utils._http as hub_http
import pytest

from app.contract.model_reference import HUB_NAME
from tests.harness.hub import COMMIT, Hub, running_hub
from tests.harness.runs import create_run, small_data, until
from tests.harness.specs import make_spec
from workers.run_directory import HIDDEN_VARIABLE, INTERRUPTED, TOKEN_VARIABLE, RunDirectory
from workers.training.models.hub_limits import LISTING_BYTES, DownloadLimits, NotFollowed, TooMuch, TooSlow
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2
from workers.training.processes.filesystem_view import named_view
from workers.training.processes.preloading import command

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    ensure_tiny_gpt2(tmp_path / "source")
    with running_hub(tmp_path / "source") as hub:
        yield hub


def laid(data: Path) -> RunDirectory:
    """A run of a model of the hub."""
    spec = make_spec(data=small_data(), max_steps=2)
    model = spec.model.model_copy(update={"name": "me/tiny", "source": "hub", "fingerprint": None})
    (data / "runs").mkdir(parents=True)
    run = create_run(data / "runs" / "ftjob-1", spec.model_copy(update={"model": model}))
    run.write_assignment(run.assignment().model_copy(update={"model_path": "me/tiny"}))
    return run


def started(
    run: RunDirectory, hub_url: str, home: Path, token: bytes = b"hf_secret"
) -> subprocess.Popen[str]:
    """An isolated trainer, with a token of the hub's."""
    reading, writing = os.pipe()
    os.write(writing, token)
    os.close(writing)
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), TOKEN_VARIABLE: str(reading),
            HIDDEN_VARIABLE: named_view(run.path.parent.parent, run.assignment())}  # fmt: skip
    try:
        return subprocess.Popen(
            command(run.path), env=env, cwd=ROOT, pass_fds=[reading], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    finally:
        os.close(reading)


def trained(
    run: RunDirectory, hub_url: str, home: Path, token: bytes = b"hf_secret"
) -> subprocess.CompletedProcess[str]:
    """The same to its end."""
    with started(run, hub_url, home, token) as trainer:
        printed, errors = trainer.communicate()
    return subprocess.CompletedProcess([], trainer.returncode, printed, errors)


def test_a_model_of_the_hub_is_downloaded_with_the_token_and_trained_without(
    tmp_path: Path, hub: Hub
) -> None:
    run = laid(tmp_path / "data")
    done = trained(run, f"http://127.0.0.1:{hub.server_port}", tmp_path / "hub")
    assert done.returncode == 0, done.stderr
    assert hub.downloaded_with == {"Bearer hf_secret"}
    assert run.outcome() is not None
    assert "hf_secret" not in done.stdout + done.stderr


def test_a_stop_during_a_download_ends_it(tmp_path: Path) -> None:
    run = laid(tmp_path / "data")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        trainer = started(run, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "hub")
        connection, _ = silent.accept()
        with connection:
            trainer.send_signal(signal.SIGTERM)
            _, errors = trainer.communicate(timeout=30)
    assert trainer.returncode == INTERRUPTED, errors
    assert run.failure() is None


def test_a_download_that_is_killed_is_a_crash(tmp_path: Path) -> None:
    """It is not an interruption, after which the job would be tried again without limit."""
    run = laid(tmp_path / "data")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        trainer = started(run, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "hub")
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children")
        until(lambda: children.read_text() != "", 30)
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        _, errors = trainer.communicate(timeout=30)
    assert trainer.returncode == -signal.SIGKILL, errors


def test_an_unreachable_hub_is_reported_before_training(tmp_path: Path) -> None:
    run = laid(tmp_path / "data")
    assert trained(run, "http://127.0.0.1:9", tmp_path / "hub").returncode == 1
    failure = run.failure()
    assert failure is not None
    assert failure.code == "model_not_loaded"
    assert "me/tiny" in failure.message
    assert not failure.permanent


LARGE, KEPT = 25 * 2**20, 10 * 2**20
"""Bytes of a file of which a part is kept when its download breaks: the client writes 10 MiB at a time."""


@pytest.mark.thorough
def test_a_broken_download_is_continued_where_it_broke(tmp_path: Path, hub: Hub) -> None:
    run = laid(tmp_path / "data")
    hub.files["other.safetensors"] = bytes(LARGE)
    hub.breaks_after = KEPT + 2**20
    done = trained(run, hub.url, tmp_path / "hub")
    assert done.returncode == 0, done.stderr
    assert hub.continued_from == [KEPT]


@pytest.mark.thorough
def test_a_job_whose_download_stays_broken_tries_again_later(tmp_path: Path, hub: Hub) -> None:
    run = laid(tmp_path / "data")
    hub.breaks_after, hub.stays_broken = 100_000, True
    done = trained(run, hub.url, tmp_path / "hub")
    failure = run.failure()
    assert done.returncode == 1
    assert failure is not None
    assert not failure.permanent
    hub.breaks_after, hub.stays_broken = None, False
    (run.path / "failure.json").unlink()
    done = trained(run, hub.url, tmp_path / "hub")
    assert done.returncode == 0, done.stderr


def test_a_rejected_token_fails_the_job_for_good(tmp_path: Path, hub: Hub) -> None:
    run = laid(tmp_path / "data")
    hub.token = "hf_right"
    assert trained(run, hub.url, tmp_path / "hub", b"hf_wrong").returncode == 1
    failure = run.failure()
    assert failure is not None
    assert failure.permanent
    assert "hf_wrong" not in failure.message


@pytest.mark.parametrize(
    ("what", "name"),
    [("tag", "../../../stolen"), ("commit", "/tmp/accrue-stolen"), ("missing_from", "../../../stolen")],
)
def test_what_the_hub_says_does_not_become_a_path(tmp_path: Path, hub: Hub, what: str, name: str) -> None:
    run = laid(tmp_path / "data")
    setattr(hub, what, name)
    assert trained(run, hub.url, tmp_path / "hub").returncode == 1
    failure = run.failure()
    assert failure is not None
    assert failure.permanent
    assert "not allowed" in failure.message
    assert not list(tmp_path.rglob("*stolen*"))
    assert not Path("/tmp/accrue-stolen").exists()


def refusal(run: RunDirectory, hub: Hub, tmp_path: Path) -> str:
    """Why a run could not fetch its model; a later attempt would not help."""
    done = trained(run, hub.url, tmp_path / "hub")
    assert done.returncode == 1, done.stderr
    failure = run.failure()
    assert failure is not None
    assert (failure.code, failure.permanent) == ("model_not_loaded", True)
    return failure.message


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_redirects_to_this_machine_are_not_followed(tmp_path: Path, hub: Hub, host: str) -> None:
    with running_hub(tmp_path / "source") as internal:
        hub.redirects["chat_template.jinja"] = (
            f"http://{host}:{internal.server_port}/me/tiny/resolve/main/config.json"
        )
        assert "not on the public internet" in refusal(laid(tmp_path / "data"), hub, tmp_path)
        assert not internal.downloaded


@pytest.mark.thorough
def test_redirects_within_the_hub_are_followed(tmp_path: Path, hub: Hub) -> None:
    hub.files["moved"] = hub.files["config.json"]
    hub.redirects["config.json"] = f"/me/tiny/resolve/{COMMIT}/moved"
    run = laid(tmp_path / "data")
    done = trained(run, hub.url, tmp_path / "hub")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("described", [b'{"a": 1}', b"[", b" " * (33 * 2**20)])
def test_a_listing_that_is_none_fails_the_job_with_the_reason(
    tmp_path: Path, hub: Hub, described: bytes
) -> None:
    hub.described = described
    assert "could not be loaded" in refusal(laid(tmp_path / "data"), hub, tmp_path)


@pytest.mark.parametrize("revision", ["../../x", "a/../b", "x/..", "/x", ".git", "a//b"])
def test_a_revision_is_not_a_path(tmp_path: Path, hub: Hub, revision: str) -> None:
    assert not re.fullmatch(HUB_NAME, f"me/tiny@{revision}")
    run = laid(tmp_path / "data")
    assignment = run.assignment()
    model = assignment.spec.model.model_copy(update={"revision": revision})
    spec = assignment.spec.model_copy(update={"model": model})
    run.write_assignment(assignment.model_copy(update={"spec": spec}))
    assert "no branch, tag or commit" in refusal(run, hub, tmp_path)
    assert not hub.downloaded


def test_downloads_are_limited() -> None:
    now = [0.0]
    limits = DownloadLimits("http://hub", 1000, lambda: now[0])
    limits._count(2**31, described=False)
    with pytest.raises(TooMuch, match=r"2\.0 GiB"):
        limits._count(20_000, described=False)
    slow = DownloadLimits("http://hub", 1000, lambda: now[0])
    slow._count(1000, described=False)
    now[0] = 119.0
    slow._count(1000, described=False)
    now[0] = 121.0
    with pytest.raises(TooSlow):
        slow._count(1000, described=False)
    described = DownloadLimits("http://hub", 1000, lambda: now[0])
    described._count(LISTING_BYTES, described=True)
    with pytest.raises(TooMuch, match="describes"):
        described._count(1, described=True)


@pytest.mark.parametrize("private", ["http://10.0.0.1/a", "https://127.0.0.1/a", "ftp://example.com/a"])
def test_a_request_goes_only_to_the_hub_or_the_public_internet(private: str) -> None:
    http: Any = getattr(hub_http, "httpx2", None) or hub_http.httpx  # type: ignore[attr-defined]
    limits = DownloadLimits("http://hub:8000", 1000)
    own = http.Request("GET", "http://hub:8000/a")
    limits.check_request(own)
    assert str(own.url) == "http://hub:8000/a"
    with pytest.raises(NotFollowed):
        limits.check_request(http.Request("GET", private))


def test_a_request_connects_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    http: Any = getattr(hub_http, "httpx2", None) or hub_http.httpx  # type: ignore[attr-defined]
    monkeypatch.setattr("app.contract.public_addresses.resolve_host", lambda host, port: "93.184.215.14")
    request = http.Request("GET", "https://files.example/a?b=c")
    DownloadLimits("https://hub", 1000).check_request(request)
    assert str(request.url) == "https://93.184.215.14/a?b=c"
    assert request.headers["Host"] == "files.example"
    assert request.extensions["sni_hostname"] == "files.example"
