"""Terminal output of the commands: plans, lists, a job's progress."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from app.cli.client import Client, TemporaryError
from app.contract.objective import OF_SEQUENCES
from app.planning.devices import GIB, MIB

if TYPE_CHECKING:
    from app.maintenance.doctor import Finding

console = Console(markup=False)  # names and messages come from users: [/bold] in them is printed as it is

_BY = {"formula": "by formula", "simulated": "by simulation", "measured": "by measurement"}

_REASONS = {
    "no_worker": "no worker is running: start one with accrue worker",
    "quota_used_up": "its key has used up its device hours of this month: it waits for the next, or for an "
    "admin to raise the quota",
    "no_matching_worker": "no worker has the required labels: accrue gpus shows those of each worker",
    "no_free_gpu": "waiting for free devices",
    "retry_delay": "waiting to retry after a failure",
    "starting": "waiting for a worker to claim it",
}
"""Why a job waits, by the service's `waiting.reason`."""

WIDE = 120
"""The width in characters from which a terminal shows all columns of a table."""

_POLL_SECONDS = 0.5
_POLLS_BETWEEN_WARNINGS = 4
_POLLS_BETWEEN_LINES = 40
INTERRUPTED = 130
"""The exit status that shells use after Ctrl-C: 128 + SIGINT."""

_ENDED = ("succeeded", "failed", "cancelled")


def follow(client: Client, job_id: str, *, stays: bool = True) -> int:
    """Shows a job's progress until it has ended. Returns the exit status, 0 if it succeeded.

    Args:
        stays: whether the service keeps running afterwards.
    """
    path = f"/gradient-accumulation/training/{job_id}"
    texts = ("{task.description}", "{task.fields[steps]}{task.fields[within]}", "loss {task.fields[loss]}",
             "{task.fields[speed]} tokens/s", "ETA {task.fields[eta]}")  # fmt: skip
    name, *rest = (TextColumn(each, markup=False) for each in texts)
    columns = (name, BarColumn(), *rest[:3], TimeElapsedColumn(), rest[3])
    job, warned = client.get(path), _Warned(client, path)
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(job_id, total=None, steps="", within="", loss="-", speed="-", eta="-")
            _show_progress(bar, task, job)
            polls, shown = 0, ""
            while job["status"] not in _ENDED:
                if job["status"] == "paused" and shown != "paused":
                    bar.print(f"The job is paused: accrue resume {job_id} continues it", highlight=False)
                shown = job["status"]
                time.sleep(_POLL_SECONDS)
                job, polls = (client.get_patiently(path, notify) if stays else client.get(path)), polls + 1
                _show_progress(bar, task, job)
                if polls % _POLLS_BETWEEN_WARNINGS == 0:
                    with suppress(TemporaryError):  # they are shown later
                        warned.show()
                # Only without a terminal, which shows the moving bar instead.
                if polls % _POLLS_BETWEEN_LINES == 0 and not console.is_terminal:
                    bar.print(_line(job), highlight=False)
            warned.show()
    except KeyboardInterrupt:
        if stays:
            console.print(_continues(job_id))
        return INTERRUPTED
    if job["status"] == "succeeded":
        stats = client.get(f"/gradient-accumulation/stats/{job_id}")["stats"]
        _show_end(job, stats["tokens_per_second"])
        if stays and job["links"]["model"]:
            was_evaluated = job["result"]["eval_loss"] is not None  # so that there are held-out prompts
            hint = "; accrue completions shows how it completes prompts" if was_evaluated else ""
            if job["training_config"].get("objective") in OF_SEQUENCES:
                console.print("accrue download fetches the model")
            else:
                console.print(f"accrue chat talks to the model; accrue download fetches it{hint}")
        return 0
    return _show_end(job)


def notify(message: str) -> None:
    """Shows a message beside a command's output."""
    Console(stderr=True, markup=False, highlight=False).print(message)


def _continues(job_id: str) -> str:
    return f"The job continues: accrue watch {job_id} follows it, accrue cancel {job_id} ends it"


@contextmanager
def _continuing(job_id: str) -> Iterator[None]:
    """Says that a job continues, and ends the command, if the user presses Ctrl-C within the block."""
    try:
        yield
    except KeyboardInterrupt:
        notify(_continues(job_id))
        sys.exit(INTERRUPTED)


class _Warned:
    """Shows each of a job's warnings once."""

    def __init__(self, client: Client, path: str) -> None:
        self._client, self._path, self._shown = client, path, set[str]()

    def show(self) -> None:
        for event in reversed(self._client.get(f"{self._path}/events", params={"limit": 50})["data"]):
            if event["level"] == "warning" and event["id"] not in self._shown:
                console.print(f"warning: {event['message']}", style="yellow", markup=False, highlight=False)
            self._shown.add(event["id"])


def waiting_for(job: dict[str, Any]) -> str | None:
    """Why a job waits, in words; None if it does not."""
    reason = job["waiting"] and job["waiting"]["reason"]
    return _REASONS.get(reason, reason) if reason else None


def wait_for(client: Client, job_id: str, doing: str, *, quiet: bool = False) -> dict[str, Any]:
    """Waits for a job to end, and shows why the job is queued. Returns the job."""
    with console.status(f"{job_id}: queued") if not quiet else nullcontext() as status, _continuing(job_id):
        while True:
            job: dict[str, Any] = client.get_patiently(f"/gradient-accumulation/training/{job_id}", notify)
            if job["status"] in _ENDED:
                return job
            if status is not None:
                state = waiting_for(job) or doing
                status.update(f"{job_id}: {state}")
            time.sleep(_POLL_SECONDS)


def show_tuning(job: dict[str, Any]) -> int:
    """Shows what a tuning run found. Returns 0 if the job succeeded."""
    if job["status"] != "succeeded":
        return _show_end(job)
    tuning = job["result"]["tuning"]
    table = Table("tokens", "micro-batches", "samples/s", "tokens/s", "peak", "", box=None)
    for tried in tuning["tried"]:
        table.add_row(
            f"{tried['token_budget']:,}", str(tried["micro_batches"]),
            _speed(tried["samples_per_second"]), f"{tried['tokens_per_second']:,.0f}",
            format_bytes(tried["peak_bytes"]),
            "chosen" if tried["token_budget"] == tuning["token_budget"] else "",
        )  # fmt: skip
    console.print(
        f"{job['model_name']} on {job['device']}, {tuning['samples']} samples, {job['plan']['precision']}"
    )
    console.print(table)
    console.print(
        "Chosen: the smallest size that is within 3% of the fastest. Later plans with the same model, "
        "training options, sample length and kind of device use it."
    )
    return 0


def show_plan(job: dict[str, Any]) -> None:
    """The plan of a job or of a dry run."""
    plan = job["plan"]
    total = plan["steps_total"]
    unknown = "number of steps unknown until the data is tokenised"
    steps = unknown if total is None else f"{total:,} step{'s' * (total != 1)}"
    most, rule = plan["micro_batches"], plan["ranks"][0]["micro_batch_rule"]
    cut = {
        "token_budget": f"1 to {most} micro-batches of at most {{tokens:,}} tokens" if most > 1
        else "a micro-batch of at most {tokens:,} tokens",
        "count": "{micro_batches} micro-batches",
        "size": f"{most} micro-batch{'es' * (most > 1)} of at most {{samples}} samples",
    }[rule["rule"]].format(**rule)  # fmt: skip
    if rule.get("unpadded_tokens"):
        cut += f" ({rule['unpadded_tokens']:,} if they need no padding)"
    console.print(
        f"plan ({_BY[plan['source']]}), for samples of up to {_sample_length(job)} tokens: effective batch "
        f"{job['effective_batch_size']} in {cut}; {steps}; "
        f"learning rate {job['learning_rate']:.3g}; {plan['precision']} on {plan['device']}",
        highlight=False,
    )
    if plan["predicted_duration_seconds"] is not None:
        console.print(f"expected to take {_expected(plan)}", highlight=False)
    for warning in plan["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def _sample_length(job: dict[str, Any]) -> str:
    return f"{job['plan']['sample_length'] or job['dataset']['max_length']:,}"


def _expected(plan: dict[str, Any]) -> str:
    """A plan's predicted duration, as in 12:30 (8:00 to 20:00)."""
    low, high = plan["predicted_duration_range"] or (None, None)
    within = f" ({_duration(low)} to {_duration(high)})" if low is not None else ""
    return _duration(plan["predicted_duration_seconds"]) + within


def show_findings(found: list["Finding"]) -> None:
    """Shows what `accrue doctor` found."""
    styles = {"ok": "green", "warning": "yellow", "error": "red"}
    table = Table("", "", "", box=None, show_header=False)
    for finding in found:
        verdict = Text(finding.verdict, style=styles[finding.verdict])
        table.add_row(verdict, finding.what, Text(finding.message))
    console.print(table)


def show_jobs(jobs: list[dict[str, Any]], *, filtered: bool = False) -> None:
    """Shows a table of jobs; a narrow terminal omits some columns."""
    wide = console.width >= WIDE
    columns: list[Column | str] = [Column("job", no_wrap=True), "status", "step", "loss", "batch", "method"]
    table = Table(*columns, *(["val loss", "model", "created"] if wide else []), box=None)
    reasons = {reason: None for job in jobs if (reason := waiting_for(job)) is not None}
    for job in jobs:
        progress = job["progress"]
        reason = waiting_for(job)
        state = job["status"] + (f" ({reason})" if reason and len(reasons) > 1 else "")
        state += ", tuning only" if job["tune"] == "only" else ""
        more = [
            _number(job["result"] and job["result"]["eval_loss"]), job["model_name"],
            time.strftime("%Y-%m-%d %H:%M", time.localtime(job["created_at"])),
        ]  # fmt: skip
        table.add_row(
            job["id"], state, f"{progress['step']}/{progress['steps_total'] or '?'}",
            _number(progress["loss"]), str(job["effective_batch_size"]), _method(job),
            *(more if wide else []),
        )  # fmt: skip
    none = "No jobs match." if filtered else "No jobs yet: accrue submit FILE."
    console.print(table if jobs else f"{none} With a key, you see only the jobs created with it.")
    if len(reasons) == 1:
        reason = next(iter(reasons))
        console.print(f"Why a queued job waits: {reason}.", highlight=False, soft_wrap=True)
    for job in jobs:
        if job["error"]:
            message = f"{job['id']}: {job['error']['message']}"
            console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)


def show_batch_size(answer: dict[str, Any]) -> None:
    """The calculator's answer as tables."""
    verdict = "fits" if answer["fits"] else "does not fit"
    console.print(f"{answer['model_name']}: {verdict}. {answer['explanation']}", highlight=False)
    devices = Table("device", "memory", "limit", "largest micro-batch", "micro-batches", box=None)
    for device in answer["devices"]:
        devices.add_row(
            f"{device['gpu_id']} {device['name']}",
            format_bytes(device["memory_bytes"]),
            format_bytes(device["memory_limit_bytes"]),
            str(device["max_micro_batch_size"]),
            _sizes(device["micro_batch_sizes"]),
        )
    console.print(devices)
    memory = Table(f"memory, {answer['source']}", "", box=None)
    for name, size in answer["memory"].items():
        memory.add_row(name.removesuffix("_bytes").replace("_", " "), format_bytes(size))
    console.print(memory)
    if answer["alternatives"]:
        others = Table("alternative", "fits", "micro-batch", "steps", "peak", "samples/s", box=None)
        for other in answer["alternatives"]:
            others.add_row(
                other["change"],
                "yes" if other["fits"] else "no",
                str(other["micro_batch_size"]),
                str(other["accumulation_steps"]),
                ("~" if other["source"] == "formula" != answer["source"] else "")
                + format_bytes(other["peak_process_bytes"]),
                _speed(other["predicted_samples_per_second"]),
            )
        console.print(others)
    for warning in answer["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False)


def _show_progress(bar: Progress, task: TaskID, job: dict[str, Any]) -> None:
    progress = job["progress"]
    reason = waiting_for(job)
    state = job["status"] + (f": {reason}" if reason else "")
    if progress.get("samples_to_prepare") and job["status"] == "running":
        done, of = progress["prepared_samples"], progress["samples_to_prepare"]
        state += f": prepared {done:,} of {of:,} samples"
    bar.update(
        task,
        description=state,
        total=progress["steps_total"],
        completed=progress["step"],
        steps=f"{progress['step']}/{progress['steps_total'] or '?'}",
        within=f" +{progress['accumulation_step']}" if progress["within_window"] else "",
        loss=_number(progress["loss"]),
        speed=f"{progress['tokens_per_second']:,.0f}" if progress["tokens_per_second"] else "-",
        eta=_duration(progress["eta_seconds"]),
    )


def _line(job: dict[str, Any]) -> str:
    progress = job["progress"]
    return (
        f"{job['status']}: step {progress['step']}/{progress['steps_total'] or '?'}, loss "
        f"{_number(progress['loss'])}, ETA {_duration(progress['eta_seconds'])}"
    )


def _accuracy(result: dict[str, Any], *, classifies: bool) -> str:
    share, rewards = result["eval_token_accuracy"], result.get("eval_rewards") or {}
    if rewards.get("accuracy") is not None:
        return f" ({rewards['accuracy']:.1%} of their pairs in the right order)"
    exact = result.get("eval_exact_match")
    if share is None:
        return ""
    if classifies:
        return f" ({share:.1%} of the texts classified correctly)"
    whole = f", every token in {exact:.1%} of the samples" if exact else ""
    return f" ({share:.1%} of their target tokens predicted correctly{whole})"


def _show_end(job: dict[str, Any], tokens_per_second: float | None = None) -> int:
    if job["status"] == "succeeded":
        result = job["result"]
        console.print(
            f"succeeded: loss {_number(result['first_loss'])} → {_number(result['final_loss'])}"
            + (f", {_number(result['eval_loss'])} on held-out samples" if result["eval_loss"] else "")
            + _accuracy(result, classifies=job["training_config"].get("objective") == "classification")
            + f"; trained on {result['trained_tokens']:,} target tokens"
            + (f", {tokens_per_second:,.0f} input tokens/s on average" if tokens_per_second else ""),
            highlight=False,
        )
        for rank in job["progress"]["ranks"] or ():
            console.print(_rank(rank), highlight=False)
        return 0
    reason = job["error"]["message"] if job["error"] else "it was cancelled"
    console.print(f"{job['status']}: {reason}", style="red", markup=False, highlight=False)
    return 1


def _rank(rank: dict[str, Any]) -> str:
    """What one of several devices did."""
    memory = f", at most {rank['peak_gb']:.2f} GiB" if rank["peak_gb"] is not None else ""
    return (
        f"rank {rank['rank']}: {rank['micro_batches']:,} micro-batches, {rank['tokens']:,} tokens, "
        f"{_speed(rank['tokens_per_second'])} tokens/s, idle for {rank['idle_share'] or 0:.0%}{memory}"
    )


def _sizes(sizes: list[int]) -> str:
    """[8, 8, 7] as 2 × 8 + 1 × 7."""
    return " + ".join(f"{sizes.count(size)} × {size}" for size in sorted(set(sizes), reverse=True)) or "none"


def format_bytes(size: int) -> str:
    if size < MIB / 10:
        return f"{size / 1024:.1f} KiB"
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


def _speed(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _method(job: dict[str, Any]) -> str:
    """The name of a job's training method, also if it was given with options."""
    method = job["training_config"].get("method") or "full"
    return method if isinstance(method, str) else str(next(iter(method)))
