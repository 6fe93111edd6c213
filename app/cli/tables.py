"""Tables for the terminal: comparisons, sweeps, completions, previews, models, files, keys and devices. The
list of jobs is in terminal.py."""

import json
import time
from itertools import groupby
from math import ceil
from operator import itemgetter
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from app.cli.terminal import WIDE, console, format_bytes

_BAR = 40
"""Characters of the longest bar."""

_LEVELS = {"info": "", "warning": "yellow", "error": "red"}


def show_event(event: dict[str, Any]) -> None:
    """Shows an event as one line."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["created_at"]))
    line = Text.assemble((when, "dim"), "  ", (event["message"], _LEVELS[event["level"]]))
    console.print(line, soft_wrap=True)


def show_comparison(compared: dict[str, Any]) -> None:
    """A row for each job; noise is the variance of the loss around its trend, divided by the first job's."""
    wide = console.width >= WIDE
    columns: list[Column | str] = [Column("job", no_wrap=True), "batch", "loss", "noise", "tokens/s"]
    more = ["model", "steps", "final loss", "peak", "padding"] if wide else []
    table = Table(*columns, *more, box=None)
    for job in compared["jobs"]:
        stats = job["stats"]
        rest = [
            job["model_name"], f"{job['steps']:,}", f"{job['final_loss']:.4f}",
            _or_dash(stats["peak_memory_gb"], "{:.2f} GiB"), _or_dash(stats["padding_share"], "{:.1%}"),
        ]  # fmt: skip
        table.add_row(
            job["training_id"],
            f"{job['effective_batch_size']} in {_or_dash(stats['accumulation_steps'], '{:.3g}')}"
            + (f" × {len(stats['ranks'])} devices" if stats.get("ranks") else ""),
            f"{compared['loss'][job['training_id']][-1]:.4f}",
            _or_dash(job["noise_ratio"], "x {:.2f}"),
            _or_dash(stats["tokens_per_second"], "{:,.0f}"),
            *(rest if wide else []),
        )
    console.print(table)
    seen, averaged = compared["samples_seen"], compared["averaged_samples"]
    console.print(
        f"Loss after {seen[-1]:,.0f} samples, which all jobs have seen: the mean of the last {averaged:,}. "
        "Noise is relative to the first job.",
        highlight=False,
    )
    if (why := compared["why_not_comparable"]) is not None:
        console.print(f"Warning: {why}.", style="yellow", highlight=False)


def show_completions(job_id: str, completions: list[dict[str, Any]], *, predicts_tokens: bool = True) -> None:
    """Shows each held-out prompt, the expected completion, and the model's before, during and after
    training."""
    console.print(f"{job_id}: {len(completions)} held-out prompts", highlight=False)
    if not completions and not predicts_tokens:
        console.print("A classifier or reward model completes nothing.")
    elif not completions:
        console.print(
            "No prompt was held out: submit with --set dataset_config.validation_split=0.1", soft_wrap=True
        )
    for each in completions:
        console.rule(style="dim")
        earlier = [(f"step {known['step']}", known["text"]) for known in each["at_evaluations"]]
        first = [(name, each[name]) for name in ("prompt", "expected", "before")]
        for name, text in (*first, *earlier, ("after", each["after"])):
            said = "(not generated)" if text is None else text
            console.print(Text.assemble((f"{name:<9} ", "bold"), said), soft_wrap=True)


def show_preview(seen: dict[str, Any]) -> None:
    """The first samples, with the tokens that count in green; then the lengths of all samples."""
    for sample in seen["samples"]:
        tokens, targets = len(sample["tokens"]), sample["target_tokens"]
        answer = f" ({sample['answer']})" if sample["answer"] else ""
        console.rule(
            f"line {sample['line']}{answer}: {tokens} tokens, {targets} count toward the loss", style="dim"
        )
        for counts, run in groupby(zip(sample["counts"], sample["tokens"], strict=True), itemgetter(0)):
            text = "".join(token for _, token in run)
            console.print(Text(text, "green" if counts else "dim"), end="", soft_wrap=True)
        console.print()
    lengths = seen["lengths"]
    console.rule(style="dim")
    most = max(each["examples"] for each in lengths["histogram"])
    for each in lengths["histogram"]:
        span = f"{each['at_least']:,}-{each['below'] - 1:,}"
        bar = "█" * ceil(_BAR * each["examples"] / most)
        console.print(f"{span:>15} tokens {each['examples']:>7,} {bar}", highlight=False)
    console.print(
        f"{_measured(lengths, seen)}: {lengths['shortest']:,} to "
        f"{lengths['longest']:,} tokens, {lengths['mean']:,.0f} on average; "
        f"{lengths['target_share']:.0%} of the tokens count toward the loss.",
        highlight=False,
        soft_wrap=True,
    )
    of_those = "of them " if lengths["examples"] < seen["examples"] else "samples "
    for count, what in (
        (lengths["over_max_length"], f"{of_those}are longer than max_length {seen['max_length']}"),
        (
            lengths["without_targets"],
            f"{of_those}have no token within max_length that counts toward the loss",
        ),
        (
            lengths.get("equal_answers", 0),
            f"{of_those}have the same chosen and rejected answer within max_length",
        ),
        (
            lengths.get("without_tool_calls", 0),
            "chats lose their tool calls, because the model's chat template does not render them",
        ),
    ):
        if count:
            console.print(f"{count:,} {what}.", style="yellow", highlight=False)
    if lengths.get("unused_keys"):
        console.print(f"Keys that are not used: {', '.join(lengths['unused_keys'])}.", highlight=False)


def _measured(lengths: dict[str, Any], seen: dict[str, Any]) -> str:
    """Which samples were measured: all, or some of a large file."""
    if lengths["examples"] == seen["examples"]:
        return f"{lengths['examples']:,} samples"
    return f"Measured {lengths['examples']:,} of {seen['examples']:,} samples"


def show_models(trained: list[dict[str, Any]], to_plan_for: list[dict[str, Any]]) -> None:
    """Shows the base models that Accrue can plan, then the trained models."""
    others = Table(Column("base model", no_wrap=True), "parameters", "context length", "source", box=None)
    for model in to_plan_for:
        positions = f"{model['positions']:,}"
        others.add_row(model["id"], _parameters(model["parameters"]), positions, model["source"])
    console.print(others)
    console.print(
        "Accrue can plan all catalogue models. It can train those whose files are on this machine or on the "
        "Hugging Face Hub."
    )
    for model in trained:
        console.print(f"trained: {model['id']}, from {model['parent']} by {model['job']}", soft_wrap=True)


def show_keys(keys: list[dict[str, Any]]) -> None:
    """Shows API keys; times are in UTC."""
    table = Table(Column("key", no_wrap=True), "name", "scopes", "expires", "last used", "quota", box=None)
    for key in keys:
        ends = "revoked" if key["revoked_at"] else _minute(key["expires_at"]) or "never"
        table.add_row(
            key["id"],
            key["name"],
            ", ".join(key["scopes"]),
            ends,
            _minute(key["last_used_at"]) or "-",
            "-" if key["device_hours"] is None else f"{key['device_hours']:,g} h a month",
        )
    console.print(table if keys else "No keys yet: the service accepts requests from this machine only.")


def show_usage(usage: dict[str, Any]) -> None:
    """Shows device hours by key and day, and how far quotas are used up."""
    table = Table("day", Column("key", no_wrap=True), "name", "device hours", "attempts", box=None)
    for each in usage["data"]:
        table.add_row(
            each["day"], each["key_id"] or "-", each["key_name"] or "-", f"{each['device_hours']:,.2f}",
            str(each["attempts"]),
        )  # fmt: skip
    console.print(table if usage["data"] else "Nothing was used on these days.")
    console.print(
        f"{usage['first']} to {usage['last']}: {usage['device_hours']:,.2f} device hours", highlight=False
    )
    for each in usage["quotas"]:
        console.print(
            f"{each['key_id']} ({each['key_name']}): {each['used_device_hours']:,.2f} of "
            f"{each['device_hours']:,g} device hours used this month; it renews on {each['renews_on']} (UTC)",
            highlight=False,
        )


def _minute(time: str | None) -> str | None:
    """An ISO 8601 time, to the minute."""
    return time and time[:16].replace("T", " ")


def show_files(files: list[dict[str, Any]]) -> None:
    table = Table(Column("file", no_wrap=True), "name", "size", "purpose", "status", box=None)
    for file in files:
        table.add_row(
            file["id"], file["filename"], format_bytes(file["bytes"]), file["purpose"], file["status"]
        )
    console.print(table if files else "No files yet: accrue files add FILE")


def show_gpus(seen: dict[str, Any], workers: list[dict[str, Any]]) -> None:
    """Shows the devices of the service's machine, and the workers with their devices."""
    gpus = Table("GPU", "memory", "used", "load", "°C", Column("held by", no_wrap=True), box=None)
    for gpu in seen["gpu_info"]:
        gpus.add_row(
            f"{gpu['gpu_id']} {gpu['name']}", format_bytes(gpu["memory_total_bytes"]),
            "-" if gpu["memory_used_bytes"] is None else format_bytes(gpu["memory_used_bytes"]),
            _or_dash(gpu["load"], "{:.0%}"), _or_dash(gpu["temperature_celsius"], "{:.0f}"),
            gpu["held_by"] or "-",
        )  # fmt: skip
    console.print(gpus if seen["gpu_info"] else "No GPU was detected on the service's machine.")
    for gpu in seen["declared"]:
        console.print(f"declared: {gpu['gpu_id']} {gpu['name']}, {format_bytes(gpu['memory_total_bytes'])}")
    table = Table("worker", "state", "devices", "labels", "running", box=None)
    for worker in workers:
        devices = ", ".join(
            f"{each['name']} {format_bytes(each['memory_bytes'])}" for each in worker["devices"]
        )
        state = "alive" if worker["alive"] else "silent"
        labels = ", ".join(f"{name}={value}" for name, value in worker["labels"].items())
        table.add_row(worker["hostname"], state, devices, labels, ", ".join(worker["running"]) or "-")
    console.print(table if workers else "No worker has connected yet: start one with accrue worker")


def _parameters(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def show_sweep(sweep: dict[str, Any]) -> None:
    """Shows a sweep: a row for each job, and which is the best."""
    wide = console.width >= WIDE
    loss = "loss" if sweep["decided_by"] == "loss" and not wide else "validation_loss"
    fields = [name.rpartition(".")[2].replace("_", " ") for name in sweep["vary"]]
    columns = [Column("job", no_wrap=True), *fields, Column("status", no_wrap=True)]
    table = Table(*columns, *(["step", "loss"] if wide else []), loss.replace("_", " "), "", box=None)
    for job in sweep["jobs"]:
        table.add_row(
            job["training_id"],
            *(_value(job["values"].get(field)) for field in sweep["vary"]),
            job["status"],
            *(_progress(job) if wide else []),
            _or_dash(job[loss], "{:.4f}"),
            "best" if job["training_id"] == sweep["best"] else "",
        )
    console.print(f"{sweep['name']}: {len(sweep['jobs'])} jobs", highlight=False)
    console.print(table)
    if sweep["decided_by"] == "loss":
        console.print("The training loss decides, since no job has validation data.", highlight=False)
    if sweep["why_no_best"]:
        console.print(f"No job is named as the best: {sweep['why_no_best']}.", highlight=False)


def _progress(job: dict[str, Any]) -> list[str]:
    """The steps and the training loss of a sweep's job."""
    return [f"{job['step']:,} of {_or_dash(job['steps_total'], '{:,}')}", _or_dash(job["loss"], "{:.4f}")]


def show_sweep_plan(planned: dict[str, Any]) -> None:
    """Shows what the jobs of a sweep would do."""
    fields = list(planned["jobs"][0]["values"])
    table = Table(*fields, "effective batch", "micro-batches", "steps", "memory", "warnings", box=None)
    for job in planned["jobs"]:
        plan = job["plan"]["plan"]
        table.add_row(
            *(_value(value) for value in job["values"].values()),
            str(job["plan"]["effective_batch_size"]),
            str(plan["micro_batches"]),
            _or_dash(plan["steps_total"], "{:,}"),
            format_bytes(max(rank["predicted_peak_bytes"] for rank in plan["ranks"])),
            str(len(plan["warnings"]) or ""),
        )
    console.print(table)


def show_sweeps(sweeps: list[dict[str, Any]]) -> None:
    """A row for each sweep."""
    if not sweeps:
        console.print("There are no sweeps: accrue sweep creates one.")
        return
    table = Table(Column("name", no_wrap=True), "jobs", "created", box=None)
    for each in sweeps:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["created_at"]))
        table.add_row(each["name"], str(each["jobs"]), when)
    console.print(table)


def _value(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)
