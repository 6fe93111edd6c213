"""What code within a trainer or an engine can leave behind for processes that are not isolated: links in
place of folders, endless answers, and secrets beside the data folder."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.contract.inference import InferenceOrder
from app.contract.model_reference import ModelLayer
from app.contract.regular_files import NotRegular, make_folders
from app.errors import Unprocessable
from app.models import base_models, starting_models, trained_models
from app.settings import Settings, get_settings
from app.storage.database import Database
from app.storage.tables import Job
from tests.harness.specs import make_spec
from tests.harness.submissions import succeeded
from workers.inference import engine_folders
from workers.inference.engine_process import EngineProcess
from workers.inference.protocol import AnswerOrder
from workers.trainer_process import secret_files
from workers.training.processes.filesystem_view import unlinked

ROOT = Path(__file__).parents[2]


def test_a_link_in_place_of_a_model_leads_nowhere(database: Database, settings: Settings) -> None:
    """Otherwise an export would mount the data folder, and an engine would get copies of any folder."""
    job_id, model = succeeded(database, settings)
    (settings.runs_dir / "ftjob-other").mkdir()
    model.rmdir()
    model.symlink_to(settings.data_dir)
    reference = make_spec().model.model_copy(update={"source": "job", "job_id": job_id})
    with pytest.raises(ValueError, match="is a link"):
        base_models.path_of(reference, settings)
    with database.reading() as session:
        assert not trained_models.has_model(session.get_one(Job, job_id), settings)
    with pytest.raises(Unprocessable):
        starting_models.find_model(f"ft:accrue/tiny-gpt2:accrue::{job_id[6:]}", database, settings)


@pytest.mark.parametrize("place", ["model", "checkpoints/step-1"])
def test_a_link_above_a_layer_leads_nowhere(settings: Settings, place: str) -> None:
    victim = settings.runs_dir / "ftjob-victim" / place
    victim.mkdir(parents=True)
    layer = ModelLayer(name="ft:x", job_id="ftjob-1", folder=place, lora=None, fingerprint="0")
    reference = make_spec().model.model_copy(update={"layers": (layer,)})
    own = settings.runs_dir / "ftjob-1"
    own.mkdir()
    (own / place.split("/")[0]).symlink_to(f"../ftjob-victim/{place.split('/')[0]}")
    with pytest.raises(ValueError, match="is a link"):
        base_models.layer_paths(reference, settings)
    (own / place.split("/")[0]).unlink()
    (own / place).mkdir(parents=True)
    assert base_models.layer_paths(reference, settings) == (str((own / place).resolve()),)


def test_a_link_that_appears_later_is_refused_by_the_process_that_is_isolated(tmp_path: Path) -> None:
    folder = tmp_path.resolve() / "run" / "model"
    folder.mkdir(parents=True)
    assert unlinked(str(folder)) == folder
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(NotRegular):
        unlinked(str(folder))


def test_an_export_is_not_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exports").symlink_to("../victim")
    with pytest.raises(NotRegular):
        make_folders(tmp_path, "run", "exports", "export-1", "1")
    assert list((tmp_path / "victim").iterdir()) == []
    (tmp_path / "run" / "exports").unlink()
    for _ in range(2):
        make_folders(tmp_path, "run", "exports", "export-1", "1")
    assert (tmp_path / "run" / "exports" / "export-1" / "1").is_dir()


def test_adapters_are_copied_from_no_link_and_to_no_link(tmp_path: Path) -> None:
    secret, source = tmp_path / "secret", tmp_path / "model"
    secret.mkdir()
    (secret / ".env").write_text("SECRET")
    source.symlink_to(secret)
    folder = engine_folders.adapters_in(engine_folders.make())
    with pytest.raises(NotRegular):
        engine_folders.copy_into(folder, source)
    assert [path for path in folder.rglob("*") if path.is_file()] == []


WRITES = """
import sys
from pathlib import Path
from workers.training.processes.filesystem_view import restrict_view
from workers.training.processes.process_tree import run_sandboxed

def write(apart):
    hidden, staged, adapters = map(Path, sys.argv[1:])
    if not (apart and restrict_view(hidden, {staged: True, adapters: False})):
        return 77
    (staged / "mine").write_text("x")
    try:
        (adapters / "config.json").symlink_to("/victim")
    except OSError:
        return 0
    return 1

sys.exit(run_sandboxed(write, isolated=True))
"""


def test_an_engine_cannot_write_where_adapters_are_copied_to(tmp_path: Path) -> None:
    """The process that copies them is not isolated, and would follow what the engine puts there."""
    hidden, folder = tmp_path / "data", engine_folders.make()
    hidden.mkdir()
    places = [
        hidden,
        engine_folders.staged_in(folder).resolve(),
        engine_folders.adapters_in(folder).resolve(),
    ]
    done = subprocess.run([sys.executable, "-c", WRITES, *map(str, places)], cwd=ROOT, capture_output=True)
    if done.returncode == 77:
        pytest.skip("this machine lets no process change its view")
    assert done.returncode == 0, done.stderr


class _Flooded(EngineProcess):
    """An engine's connection, without the process."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._unread, self._unsent = connection, b"", bytearray()
        self._answered, self.is_open, self.was_killed = {}, True, False

    def kill(self) -> None:
        self.is_open, self.was_killed = False, True


@pytest.fixture
def flooded() -> Iterator[tuple[_Flooded, socket.socket]]:
    own, theirs = socket.socketpair()
    for each in (own, theirs):
        each.setblocking(False)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    yield _Flooded(own), theirs
    own.close()
    theirs.close()


def fill(connection: socket.socket, line: bytes) -> int:
    """Writes a line as often as there is room."""
    sent = 0
    try:
        while True:
            sent += connection.send(line * 1000)
    except BlockingIOError:
        return sent


def test_an_engine_that_never_stops_writing_does_not_keep_the_others_waiting(
    flooded: tuple[_Flooded, socket.socket],
) -> None:
    process, connection = flooded
    total = fill(connection, b"{}\n")
    taken = 0
    for _ in process.received():
        taken += 1
        if taken % 1000 == 0:
            total += fill(connection, b"{}\n")  # as fast as it is read
        assert taken < 500_000, "one turn takes all that the engine writes"
    assert 0 < taken < total // 3


def test_an_engine_that_answers_too_much_is_killed(
    flooded: tuple[_Flooded, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.inference.engine_process._MOST_ANSWER_BYTES", 5000)
    process, connection = flooded
    line = b'{"id": "1", "part": {"deltas": []}}\n'
    process.send(AnswerOrder(id="1", order=InferenceOrder(model=make_spec().model)))
    fill(connection, line)
    assert len(list(process.received())) <= 5000 // (len(line) - 1)
    assert process.was_killed


def test_requests_that_are_cancelled_do_not_count_for_ever(
    flooded: tuple[_Flooded, socket.socket],
) -> None:
    process, connection = flooded
    order = InferenceOrder(model=make_spec().model)
    for number in range(100):
        name = str(number)
        process.send(AnswerOrder(id=name, order=order))
        connection.send(b'{"id": "%d", "part": {"deltas": []}}\n' % number)
        assert len(list(process.received())) == 1
        process.send(AnswerOrder(id=name))
        connection.send(b'{"id": "%d", "part": {"deltas": []}}\n' % number)  # sent before it was cancelled
        connection.recv(2**20)
        assert len(list(process.received())) == 1
    assert process._answered == {}
    assert not process.was_killed


def test_the_worker_names_the_files_with_its_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCRUE_DATABASE_URL", raising=False)
    (tmp_path / ".env").write_text(f"ACCRUE_DATABASE_URL=sqlite:///{tmp_path}/jobs.db?timeout=5\n")
    get_settings.cache_clear()
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(["/etc/kube/a", "/etc/kube/b"]))
    named = secret_files().split(os.pathsep)
    get_settings.cache_clear()
    expected = {str(tmp_path / ".env"), f"{tmp_path}/jobs.db", f"{tmp_path}/jobs.db-wal", "/etc/kube/a"}
    assert expected <= set(named)
    assert any(name.endswith("/token") for name in named)
