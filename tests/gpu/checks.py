"""What the parts of the acceptance test share: checks, the device, and run directories on it."""

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from app.contract import fail_points
from app.contract.assignment import Assignment
from app.contract.plan import MicroBatchRule, Plan
from app.contract.reports import Outcome
from app.contract.spec import RunPrecision, Spec
from tests.harness.runs import small_data
from tests.harness.specs import cpu_plan, make_spec
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training.exceptions import Interrupted
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2


@dataclass(frozen=True)
class Check:
    """A measured value, what it is compared with, and whether it holds."""

    name: str
    value: float | str
    bound: float | str
    holds: bool

    @property
    def line(self) -> str:
        """The check as a line of the report."""
        value = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        bound = f"{self.bound:.4g}" if isinstance(self.bound, float) else self.bound
        return f"{'holds ' if self.holds else 'FAILS '} {self.name}: {value} (bound: {bound})"


def at_most(name: str, value: float, bound: float) -> Check:
    return Check(name, value, bound, value <= bound)


def at_least(name: str, value: float, bound: float) -> Check:
    return Check(name, value, bound, value >= bound)


@dataclass(frozen=True)
class Place:
    """Where the acceptance test runs."""

    kind: Literal["cpu", "cuda"]
    folder: Path

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Frees memory, and restores what a run sets for its whole process."""
        gc.collect()
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)

    def model(self, name: str, config: dict[str, Any]) -> Path:
        """A model with random weights and a tokenizer of bytes, in a folder."""
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = self.folder / "models" / name
        if folder.exists():
            return folder
        ensure_tiny_gpt2(folder)
        fields = dict(config)
        made = AutoConfig.for_model(fields.pop("model_type"), **fields)
        torch.manual_seed(7)
        (folder / "model.safetensors").unlink()
        AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(folder)
        return folder

    def run(
        self,
        name: str,
        spec: Spec,
        *,
        model: Path | None = None,
        lengths: Sequence[int] = (),
        precision: RunPrecision = "fp32",
        rule: MicroBatchRule | None = None,
        limit_bytes: int | None = None,
        attempt: int = 1,
        data: Path | None = None,
    ) -> RunDirectory:
        """A run directory for this device.

        Args:
            model: its folder; None for the built-in model.
            lengths: bytes of each text, which are its tokens but for the ends; by default 40 short ones.
            limit_bytes: the memory that may be used; None for nearly all.
            data: a file as the spec describes it, instead of texts.
        """
        own: dict[str, Any] = {}
        if data is None:
            data = self.folder / f"{name}.jsonl"
            texts = texts_of(lengths or np.random.default_rng(0).integers(8, 50, 40).tolist())
            data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            own = {"examples": len(texts), "max_length": max(64, *(len(text) + 2 for text in texts))}
        own["sha256"] = hashlib.sha256(data.read_bytes()).hexdigest()
        spec = spec.model_copy(update={"data": spec.data.model_copy(update=own)})
        run = RunDirectory(self.folder / name)
        run.write_assignment(
            Assignment(
                job_id="ftjob-acceptance", attempt=attempt, spec=spec,
                plan=self.plan(spec, precision, rule, limit_bytes),
                data_file=str(data), model_path=str(model or self.folder / "models" / "tiny"),
            )
        )  # fmt: skip
        return run

    def plan(
        self, spec: Spec, precision: RunPrecision, rule: MicroBatchRule | None, limit_bytes: int | None
    ) -> Plan:
        plan = cpu_plan(spec, rule, precision=precision)
        if not self.is_gpu:
            return plan.model_copy(update={"threads": 2})
        total = torch.cuda.get_device_properties(0).total_memory
        ranks = tuple(
            rank.model_copy(update={"gpu_id": 0, "memory_limit_bytes": limit_bytes or int(0.95 * total)})
            for rank in plan.ranks
        )
        return plan.model_copy(update={"device": "cuda", "threads": None, "ranks": ranks})


@contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    """Runs each call in a process of its own, as a trainer is one, which has not used the GPU before."""
    context = multiprocessing.get_context("forkserver")
    # Without peft: it imports bitsandbytes, which looks for GPUs, and then no fork can use them.
    context.set_forkserver_preload(["tests.gpu.runs", "transformers.models.llama.modeling_llama"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as made:
        yield made


def texts_of(lengths: Sequence[int]) -> list[str]:
    """Texts of the given lengths in bytes; the same texts on every call."""
    random, letters = np.random.default_rng(3), np.array(list("abcdefghij klmnop"))
    return ["".join(random.choice(letters, length)) for length in lengths]


def spec_with(**changes: Any) -> Spec:
    """A spec of ten steps with the certificate, on short texts."""
    return make_spec(**{"data": small_data(), "certificate": True, **changes})


def train(run: RunDirectory, stop_after: int | None = None) -> Outcome | None:
    """Trains in this process. Returns how it ended; None if it was stopped at that micro-batch."""
    from workers.training.fit import fit

    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        return stop_after is not None and looks > stop_after

    assignment = run.assignment()
    with Reporter(run, assignment.attempt) as reporter:
        try:
            return fit(run, assignment, reporter, stop)
        except Interrupted:
            return None


def train_until_killed(run: RunDirectory, micro_batch: int) -> None:
    """Trains in a process of its own, which is killed before that micro-batch, as by a power cut.

    Raises:
        AssertionError: the run ended before.
    """
    with processes() as alone, contextlib.suppress(BrokenProcessPool):
        alone.submit(_train_with_fault, run, f"rank-0.micro_batch:kill:{micro_batch}").result()
        raise AssertionError("the run ended before it was killed")


def _train_with_fault(run: RunDirectory, fault: str) -> None:
    os.environ[fail_points.VARIABLE] = fault
    train(run)


def log_of(run: RunDirectory) -> list[dict[str, Any]]:
    """The lines of the log."""
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def events_of(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    """The events of a type."""
    lines = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["type"] == kind]
