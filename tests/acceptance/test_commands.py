"""Every command: its help, and a run of it against real processes."""

import json
from pathlib import Path

import pytest

from app.cli import app
from tests.harness.commands import commands
from tests.harness.runs import until
from tests.harness.service import TRAINING, Accrue

pytestmark = pytest.mark.thorough

ELSEWHERE = {
    "up": "tests/acceptance/test_faults.py",
    "serve": "tests/harness/service.py",
    "worker": "tests/acceptance/conftest.py",
    "tune": "tests/acceptance/test_api.py",
    "import": "tests/acceptance/test_import_openai.py",
    "preview": "tests/acceptance/test_profiles.py",
    "chat": "tests/acceptance/test_inference.py",
    "export": "tests/acceptance/test_exports.py",
}
"""Commands that are run by other tests."""


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_has_a_help_text(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app([*words, "--help"], prog_name="accrue")
    assert ended.value.code == 0
    usage, summary, *_ = capsys.readouterr().out.strip().split("\n\n")
    assert usage.startswith(f"Usage: accrue {' '.join(words)}")
    assert "." in summary


def test_every_command_is_covered_by_a_test() -> None:
    here = Path(__file__)
    for words in commands():
        requested = ", ".join(f'"{word}"' for word in words)
        where = here.parents[2] / ELSEWHERE.get(words[0], here)
        assert requested in where.read_text(), f"accrue {' '.join(words)} is never run"


def run(shared: Accrue, *words: str, status: int = 0) -> str:
    """Runs a command that must end with `status`. Returns its output or, if that is not 0, its errors."""
    done = shared.command(*words)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "book.jsonl"
    path.write_text(
        "".join(json.dumps({"text": "All work and no play. " * (1 + n % 3)}) + "\n" for n in range(12))
    )
    return path


def test_a_model_from_a_plan_to_a_folder(shared: Accrue, tmp_path: Path) -> None:
    assert "fits" in run(shared, "plan", "gpt2", "--batch", "64", "--gpu", "24GB")
    assert shared.command("plan", "gpt2-xl", "--gpu", "8GB").returncode == 2
    text = tmp_path / "book.txt"
    text.write_text("All work and no play. " * 40)
    requested = ("submit", str(text), "--batch", "4", "--max-length", "64", "--max-steps", "3")
    dry = run(shared, *requested, "--dry-run", "--json", "--set", "training_config.method=lora")
    assert json.loads(dry)["training_config"]["method"] == "lora"
    assert "FIELD=VALUE" in shared.command(*requested, "--set", "nothing").stderr
    job_id = run(shared, *requested, "--metadata", "project=a b").split()[0]
    assert "succeeded: loss" in run(shared, "watch", job_id)
    assert shared.job(job_id)["progress"]["samples_seen"] == 12
    assert job_id in run(shared, "jobs", "--metadata", "project=a b")
    assert job_id not in run(shared, "jobs", "--metadata", "project=other")
    assert "NAME=VALUE" in shared.command("jobs", "--metadata", "project").stderr
    assert job_id in {job["id"] for job in json.loads(run(shared, "jobs", "--json"))["data"]}

    told = run(shared, "logs", job_id)
    assert told.index("Job submitted") < told.index("Training succeeded.")
    steps = [json.loads(line) for line in run(shared, "logs", job_id, "--steps").splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]

    assert "No prompt was held out" in run(shared, "completions", job_id)

    folder, mine = tmp_path / "model", tmp_path / "model.part" / "mine"
    mine.parent.mkdir()
    mine.touch()
    assert "model.safetensors" in run(shared, "download", job_id, str(folder))
    assert (folder / "config.json").is_file()
    assert "already exists" in run(shared, "download", job_id, str(folder), status=1)
    assert [path for path in tmp_path.iterdir() if path.name.endswith(".part")] == [mine.parent]
    assert mine.exists()


def test_a_rejected_submission_leaves_no_file(shared: Accrue, data: Path) -> None:
    before = run(shared, "files", "--json")
    run(shared, "submit", str(data), "--dry-run")
    assert "longer than" in run(shared, "submit", str(data), "--max-length", "99999", status=1)
    assert run(shared, "files", "--json") == before


@pytest.mark.slow
def test_a_sweep_from_values_to_the_best_job(shared: Accrue, data: Path) -> None:
    requested = (
        "sweep",
        str(data),
        "--vary",
        "learning_rate=1e-5,1e-2",
        "--max-steps",
        "3",
        "--max-length",
        "32",
    )
    planned = run(shared, *requested, "--dry-run")
    assert "learning_rate" in planned
    assert "0.01" in planned
    assert "There are no sweeps" in run(shared, "sweeps")
    more = ("--vary", "effective_batch_size=2,4", "--validation-split", "0.25", "--name", "mine")
    told = run(shared, *requested, *more, "--watch")
    assert told.startswith("mine: 4 jobs")
    assert told.count("succeeded") == 4
    sweep = json.loads(run(shared, "sweeps", "mine", "--json"))
    losses = {job["training_id"]: job["validation_loss"] for job in sweep["jobs"]}
    assert sweep["best"] == min(losses, key=lambda job: losses[job])
    [best] = [line for line in run(shared, "sweeps", "mine").splitlines() if "best" in line]
    assert sweep["best"] in best
    assert "mine" in run(shared, "sweeps")
    assert "choose another name" in run(shared, *requested, *more, status=1)
    assert "is not FIELD=VALUE,VALUE" in run(shared, "sweep", str(data), "--vary", "x", status=2)
    assert "No sweep has the name" in run(shared, "sweeps", "other", status=1)


def test_logs_follow_shows_events_to_the_end(shared: Accrue, data: Path) -> None:
    requested = ("submit", str(data), "--max-steps", "3", "--max-length", "32")
    job_id = run(shared, *requested, "--validation-split", "0.2").split()[0]
    told = [json.loads(line) for line in run(shared, "logs", job_id, "--follow", "--json").splitlines()]
    (completed, *_) = json.loads(run(shared, "completions", job_id, "--json"))["data"]
    assert "All work" in completed["prompt"] + completed["expected"]
    assert completed["before"] is not None
    assert completed["after"] is not None
    assert completed["prompt"].splitlines()[0] in run(shared, "completions", job_id)
    assert (told[0]["type"], told[-1]["type"]) == ("submitted", "succeeded")
    assert len({event["id"] for event in told}) == len(told)


def test_a_file_is_uploaded_once(shared: Accrue, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"text": "Only once."}) + "\n")
    requested = ("submit", str(mine), "--max-steps", "1", "--max-length", "16", "--set", "auto_start=false")
    jobs = [shared.job(run(shared, *requested).split()[0]) for _ in range(2)]
    (file_id,) = {job["dataset"]["file_id"] for job in jobs}
    run(shared, "submit", str(mine), "--dry-run")
    assert file_id in run(shared, "files")
    mine.write_text(json.dumps({"text": "Another."}) + "\n")
    assert shared.job(run(shared, *requested).split()[0])["dataset"]["file_id"] != file_id


def test_watch_shows_warnings(shared: Accrue, data: Path) -> None:
    requested = (
        "submit",
        str(data),
        "--max-steps",
        "3",
        "--max-length",
        "8",
        "--method",
        "lora",
        "--checkpointing",
    )
    told = run(shared, *requested, "--watch")
    assert "learning rate 0.0002" in told  # lora's own default
    assert told.count("cut to max_length 8") == 1
    assert "target tokens" in told
    assert "deprecated" not in told
    assert "accrue chat talks to the model; accrue download fetches it" in told
    assert "lora" in run(shared, "jobs", "--limit", "1")


def test_jobs_are_paused_resumed_cancelled_and_tried_again(shared: Accrue, data: Path) -> None:
    requested = ("submit", str(data), "--max-steps", "3", "--max-length", "32", "--set", "auto_start=false")
    job_id = run(shared, *requested).split()[0]
    assert "is queued" in run(shared, "resume", job_id) or shared.job(job_id)["status"] != "paused"
    shared.ended(job_id)
    job_id = run(shared, *requested, "--set", "priority=-5").split()[0]
    assert "is cancelled" in run(shared, "cancel", job_id)
    assert "cancelled" in run(shared, "pause", job_id, status=1)
    again = json.loads(run(shared, "retry", job_id, "--json"))["id"]
    if shared.job(again)["status"] == "queued":
        run(shared, "pause", again)
    until(lambda: shared.job(again)["status"] not in ("queued", "running"), 60)
    assert "is deleted" in run(shared, "delete", job_id)
    assert job_id not in run(shared, "jobs", "--limit", "100")


@pytest.mark.slow
def test_benchmark_measures_and_plots_the_cost_of_accumulation(shared: Accrue, tmp_path: Path) -> None:
    small = ("--micro-batch", "2", "--max-length", "16", "--micro-batches", "16", "--rounds", "1")
    said = run(shared, "benchmark", *small, "--png", str(tmp_path / "cost.png"))
    assert "accumulation steps" in said
    assert "At most 2% slower" in said
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    first, second = json.loads(run(shared, "benchmark", *small, "--steps", "1,4", "--json"))["steps"]
    assert (first["accumulation_steps"], first["windows"], first["slowdown"]) == (1, 16, 0.0)
    assert (second["accumulation_steps"], second["windows"]) == (4, 4)
    assert "as in 1,4,16" in run(shared, "benchmark", "--steps", "16", status=2)


def test_a_job_is_stopped_and_its_model_kept(shared: Accrue, data: Path) -> None:
    job_id = run(shared, "submit", str(data), "--max-steps", "100000", "--max-length", "32").split()[0]
    until(lambda: shared.job(job_id)["progress"]["step"] > 0, 60)
    assert "will be stopped" in run(shared, "stop", job_id)
    ended = shared.ended(job_id)
    assert ended["status"] == "succeeded"
    assert ended["links"]["model"] is not None
    assert 0 < ended["progress"]["step"] < 100_000


def test_jobs_are_compared(shared: Accrue, data: Path, tmp_path: Path) -> None:
    requested = ("submit", str(data), "--max-length", "32", "--epochs", "4")
    ids = [run(shared, *requested, "--batch", batch).split()[0] for batch in ("2", "4")]
    for job_id in ids:
        shared.ended(job_id)
    chart = tmp_path / "losses.png"
    told = run(shared, "compare", *ids, "--png", str(chart))
    assert all(job_id in told for job_id in ids)
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert {job["training_id"] for job in json.loads(run(shared, "compare", *ids, "--json"))["jobs"]} == set(
        ids
    )


def test_models_files_and_devices(shared: Accrue, data: Path) -> None:
    file_id = run(shared, "files", "add", str(data)).strip()
    assert file_id in run(shared, "files")
    assert file_id in {file["id"] for file in json.loads(run(shared, "files", "--json"))["data"]}
    assert "is deleted" in run(shared, "files", "delete", file_id)
    assert file_id not in run(shared, "files")

    job_id = run(shared, "submit", str(data), "--max-steps", "2", "--max-length", "32").split()[0]
    shared.ended(job_id)
    trained = json.loads(run(shared, "models", "--json"))["trained"]
    (name,) = [model["id"] for model in trained if model["job"] == job_id]
    assert "accrue/tiny-gpt2" in run(shared, "models")
    assert "is deleted" in run(shared, "models", "delete", name)
    assert name not in run(shared, "models")

    seen = json.loads(run(shared, "gpus", "--json"))
    assert len(seen["declared"]) == 4
    assert "alive" in run(shared, "gpus")


def test_administration_commands(shared: Accrue, tmp_path: Path) -> None:
    assert "newest revision" in run(shared, "migrate")
    (shared.data.parent / "models").mkdir(exist_ok=True)
    found = json.loads(run(shared, "doctor", "--json"))
    assert {finding["what"] for finding in found} >= {"database", "disk"}
    assert "without checkpoints" in run(shared, "backup", str(tmp_path / "backup"))
    shared.env["ACCRUE_DATA_DIR"] = str(tmp_path / "restored")
    try:
        assert "Restored" in run(shared, "restore", str(tmp_path / "backup"))
    finally:
        shared.env["ACCRUE_DATA_DIR"] = str(shared.data)


@pytest.mark.slow
def test_the_demo_fails_if_the_model_learned_too_little(shared: Accrue, tmp_path: Path) -> None:
    done = shared.command("demo", "--folder", str(tmp_path / "demo"), "--steps", "2")
    assert done.returncode == 1
    assert "learned less than it should" in done.stdout
    assert (tmp_path / "demo" / "loss.png").is_file()
    assert list((tmp_path / "demo" / "data" / "runs").glob("*/model/model.safetensors"))


def test_keys(accrue: Accrue) -> None:
    key = run(accrue, "keys", "create", "alice").strip()
    accrue.serve()
    accrue.key = key
    assert "A key is needed" in run(accrue, "jobs", status=1)
    listed = json.loads(run(accrue, "keys", "list", "--json"))
    assert "alice" in run(accrue, "keys", "list")
    assert "either --device-hours or --unlimited" in run(
        accrue, "keys", "set-quota", listed[0]["id"], status=2
    )
    assert "a quota of 10 device hours" in run(
        accrue, "keys", "set-quota", listed[0]["id"], "--device-hours", "10"
    )
    accrue.env["ACCRUE_API_KEY"] = key
    assert "0.00 of 10 device hours used this month" in " ".join(run(accrue, "usage").split())
    revoked = accrue.command("keys", "revoke", listed[0]["id"])
    assert "No valid key is left" in revoked.stderr
    accrue.env["ACCRUE_DATA_DIR"] = str(accrue.data / "elsewhere")
    assert "there is no data folder" in run(accrue, "keys", "list", status=1)
    assert not (accrue.data / "elsewhere").exists()


def test_errors_are_one_line_with_a_remedy(shared: Accrue, data: Path) -> None:
    assert "ACCRUE_MODELS_DIR" in run(shared, "submit", str(data), "--model", "no/such", status=1)
    assert "start one with accrue up" in run(shared, "jobs", "--url", "http://127.0.0.1:9", status=1)
    assert "No job has the id" in run(shared, "watch", "ftjob-nothing", status=1)
    assert shared.http.get(TRAINING).status_code == 200
