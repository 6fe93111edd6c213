"""Runs the trainer without a supervisor: creates run directories with assignments, and reads the results."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.contract.assignment import Assignment
from app.contract.plan import Plan, TokenBudget
from app.contract.spec import DataSpec, Spec, Strategy, ZeroStage
from tests.harness.specs import cpu_plan, make_spec
from workers.run_directory import RunDirectory
from workers.training.processes.fork_server import ForkedTrainer, ForkServer
from workers.training.processes.preloading import command

LOGGED = (
    "step",
    "micro_step",
    "epoch",
    "samples",
    "loss",
    "loss_ema",
    "learning_rate",
    "grad_norm",
    "tokens",
)


def write_texts(path: Path, count: int = 40, seed: int = 0) -> Path:
    """Texts of unequal length."""
    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefghij klmnop"))
    texts = ["".join(random.choice(letters, int(random.integers(3, 50)))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_chats(path: Path, count: int = 40) -> Path:
    """Questions with answers that a model can learn in a few steps."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number}?"},
                {"role": "assistant", "content": f"It is {number}."},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def create_run(folder: Path, spec: Spec | None = None, *, attempt: int = 1, **plan: Any) -> RunDirectory:
    """Creates a run directory for the built-in model on forty texts."""
    data = folder.parent / "data.jsonl"
    if not data.exists():
        write_texts(data)
    spec = spec or make_spec(data=small_data())
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"sha256": digest})})
    run, planned = RunDirectory(folder), cpu_plan(spec, **plan)
    run.write_assignment(
        Assignment(
            job_id="ftjob-1",
            attempt=attempt,
            spec=spec,
            plan=planned if "rule" in plan else _in_several_micro_batches(planned),
            data_file=str(data),
            model_path=str(folder.parent / "tiny-gpt2"),
        )
    )
    return run


def _in_several_micro_batches(plan: Plan) -> Plan:
    """The plan with a token budget of at most 512, so that windows of a few small samples are divided."""
    (rank,) = plan.ranks
    rule = rank.micro_batch_rule
    if not isinstance(rule, TokenBudget) or rule.tokens <= _TOKENS:
        return plan
    changed = rank.model_copy(update={"micro_batch_rule": TokenBudget(tokens=_TOKENS)})
    return plan.model_copy(update={"ranks": (changed,)})


_TOKENS = 512


def with_ranks(
    run: RunDirectory, shares: Sequence[float], strategy: Strategy = "ddp", stage: ZeroStage = 3
) -> RunDirectory:
    """The same run, planned for as many CPU ranks as there are shares."""
    assignment = run.assignment()
    own = assignment.plan.ranks[0]
    ranks = tuple(
        own.model_copy(update={"rank": rank, "gpu_id": f"cpu:{rank}", "share_of_tokens": share})
        for rank, share in enumerate(shares)
    )
    plan = assignment.plan.model_copy(update={"ranks": ranks, "strategy": strategy, "zero_stage": stage})
    run.write_assignment(assignment.model_copy(update={"plan": plan}))
    return run


def small_data(**changes: Any) -> DataSpec:
    fields = {"file_id": "file-1", "sha256": "0", "format": "text", "examples": 40, "max_length": 64,
              "overlength": "truncate", "packing": False, "validation": None}  # fmt: skip
    return DataSpec.model_validate({**fields, **changes})


def start_trainer(run: RunDirectory) -> ForkedTrainer | subprocess.Popen[bytes]:
    """`python -m workers.training` in a process of its own, which starts sooner where fork servers are
    possible."""
    with run.trainer_log.open("ab") as log:
        forked = _FORK_SERVER.start(run.path, environment(), log.fileno(), {})
        return forked or subprocess.Popen(command(run.path), stdout=log, stderr=log)


def environment() -> dict[str, str]:
    """This process's environment, without what is of a single test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


_FORK_SERVER = ForkServer()
"""It has the environment of the first test that starts a trainer."""


def start_ranks(
    run: RunDirectory, seconds: Sequence[float], factors: Sequence[float] | None = None, *options: str
) -> list[subprocess.Popen[bytes]]:
    """Starts ranks that are slow (tests/harness/slow_rank.py).

    Args:
        seconds: by rank, how much longer each micro-batch takes.
        factors: by rank, how many times as long.
    """
    factors = factors or [1.0] * len(seconds)
    number = sum(1 for _ in run.path.glob("rendezvous-*"))
    shared = {
        "WORLD_SIZE": str(len(seconds)),
        "ACCRUE_RENDEZVOUS_FILE": str(run.path / f"rendezvous-{number}"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    (run.path / f"rendezvous-{number}").touch()
    with run.trainer_log.open("ab") as log:
        return [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.harness.slow_rank",
                    str(run.path),
                    str(waits),
                    str(factor),
                    *options,
                ],
                env={**os.environ, **shared, "RANK": str(rank)},
                stdout=log,
                stderr=log,
            )
            for rank, (waits, factor) in enumerate(zip(seconds, factors, strict=True))
        ]


def log_of(run: RunDirectory) -> list[dict[str, Any]]:
    """The fields of the log's steps that must be bit-exact; of a repeated step, those of the last attempt."""
    lines: dict[int, dict[str, Any]] = {}
    for raw in run.metrics.read_text().splitlines():
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        lines[line["step"]] = {name: line[name] for name in LOGGED}
    return [lines[step] for step in sorted(lines)]


def events_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events.read_text().splitlines()]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for a condition.

    Raises:
        TimeoutError: it did not come true.
    """
    import time

    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.02)
