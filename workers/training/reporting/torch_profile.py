"""One window under torch.profiler: where its time goes, as figures, a trace and a memory snapshot."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from app.contract.reports import Operator, Operators

AT_STEP = 3
"""The update that is profiled, counted from 1: the first ones warm up."""

MAX_OPERATORS = 100

PHASES = ("data", "divergence", "routing", "forward", "backward", "synchronise", "optimizer")
"""The names that the trainer gives its phases in `record_function`, without their prefix "accrue."."""

Result = TypeVar("Result")


def profiled(
    folder: Path, device: torch.device, work: Callable[[], Result]
) -> tuple[Result, dict[str, float]]:
    """Runs `work` under the profiler, and writes trace.json, operators.json (and memory.pickle on a GPU)
    into the folder.

    Returns:
        The result of `work`, and seconds by phase: the host's and, under `device_` names, a GPU's kernels'.
    """
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    if on_gpu:
        torch.cuda.memory._record_memory_history()
    try:
        with profile(activities=activities) as profiler:
            result = work()
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    seconds, rows = {}, profiler.key_averages()
    (folder / "operators.json").write_text(_operators(rows, on_gpu).model_dump_json())
    for row in rows:
        phase = row.key.removeprefix("accrue.")
        if phase in PHASES and phase != row.key:
            seconds[phase] = row.cpu_time_total / 1e6
            if on_gpu:
                seconds[f"device_{phase}"] = row.device_time_total / 1e6
    return result, seconds


def _operators(rows: Iterable[Any], on_gpu: bool) -> Operators:
    """The slowest operators as a table, for users without a trace viewer."""
    found = [
        Operator(
            name=row.key,
            calls=row.count,
            seconds=row.cpu_time_total / 1e6,
            own_seconds=row.self_cpu_time_total / 1e6,
            device_seconds=row.self_device_time_total / 1e6 if on_gpu else None,
        )
        for row in rows
        if not row.key.startswith(("accrue.", "ProfilerStep"))
    ]
    found.sort(key=lambda each: max(each.own_seconds, each.device_seconds or 0.0), reverse=True)
    return Operators(data=tuple(found[:MAX_OPERATORS]))
