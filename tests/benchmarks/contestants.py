"""One contestant of the trainer's benchmark, in a process of its own: prints its figures as JSON.

`python -m tests.benchmarks.contestants '{"who": "accrue", ...}'`
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from app.contract.plan import FixedSize, MicroBatchRule, TokenBudget
from tests.benchmarks.material import EFFECTIVE_BATCH, RATE, SEED, create_run, order_of_samples

if TYPE_CHECKING:
    from workers.training.micro_batches.batches import MicroBatch
    from workers.training.training_run import TrainingRun


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    """Resets the high-water mark. Returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def accrue(requested: dict[str, Any], folder: Path) -> dict[str, Any]:
    """This project's trainer, as a job runs it."""
    from workers.reporter import Reporter
    from workers.training.checks import certificate
    from workers.training.exceptions import InterruptionRequested
    from workers.training.fit import train
    from workers.training.reporting.trackers import Trackers
    from workers.training.start import start

    cut: MicroBatchRule | None = FixedSize(samples=requested["rows"]) if "rows" in requested else None
    if "tokens" in requested:
        cut = TokenBudget(tokens=requested["tokens"])
    run = create_run(
        folder,
        Path(requested["model"]),
        Path(requested["data"]),
        cut,
        requested["windows"],
        requested["max_length"],
    )
    assignment = run.assignment()
    with Reporter(run, 1) as reporter, Trackers((), assignment, run.path) as trackers:
        training, _ = start(run, assignment, reporter, trackers, lambda: False)
        before = reset_peak()
        certificate.certify(training)
        began, worked = time.time(), time.process_time()
        try:
            train(training)
        except InterruptionRequested:
            raise AssertionError("the trainer stopped without a request") from None
        peak, worked = resident("VmHWM"), time.process_time() - worked
        training.loader.close()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return {
        "losses": [line["loss"] for line in lines],
        "seconds": lines[-1]["time"] - began,
        "samples": sum(line["samples"] for line in lines),
        "cpu": worked,
        "padding": sum(line["padded_tokens"] for line in lines) / sum(line["input_tokens"] for line in lines),
        "peak_bytes": peak - before,
    }


def hugging_face(requested: dict[str, Any], folder: Path) -> dict[str, Any]:
    """transformers' Trainer, with the settings that its documentation gives for accumulation."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = AutoTokenizer.from_pretrained(requested["model"])
    model = AutoModelForCausalLM.from_pretrained(requested["model"], attn_implementation="sdpa")
    texts = [json.loads(line)["text"] for line in Path(requested["data"]).read_text().splitlines()]
    count = requested["windows"] * EFFECTIVE_BATCH
    ids = [[*tokenizer(texts[i]).input_ids, tokenizer.eos_token_id][: requested["max_length"]]
           for i in order_of_samples(len(texts))[:count]]  # fmt: skip
    rows = [{"input_ids": row, "length": len(row)} for row in ids]

    class Times(TrainerCallback):  # type: ignore[misc]
        losses: list[float]

        def __init__(self) -> None:
            self.times: list[float] = []
            self.losses = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.times.append(time.time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.time())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                self.losses.append(float(logs["loss"]))

    class Sequential(Trainer):  # type: ignore[misc]
        """The same samples in the same windows, which Trainer has no setting for."""

        def _get_train_sampler(self, *arguments: Any) -> Any:
            if requested["grouped"]:
                return super()._get_train_sampler(*arguments)
            return torch.utils.data.SequentialSampler(self.train_dataset)

    times = Times()
    trainer = Sequential(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=requested["rows"],
            gradient_accumulation_steps=EFFECTIVE_BATCH // requested["rows"] // ranks, num_train_epochs=1,
            learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=SEED,
            train_sampling_strategy="group_by_length" if requested["grouped"] else "random",
            dataloader_pin_memory=False, ddp_backend="gloo" if ranks > 1 else None,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[times],
    )  # fmt: skip
    before = reset_peak()
    worked = time.process_time()
    trainer.train()
    worked = time.process_time() - worked
    return {
        "cpu": worked,
        "losses": times.losses,
        "seconds": times.times[-1] - times.times[0],
        "samples": EFFECTIVE_BATCH * requested["windows"],
        "padding": None,
        "peak_bytes": resident("VmHWM") - before,
    }


class InterleavedBaseline:
    """Runs each micro-batch of a window in a plain training loop first, just before the trainer runs it.

    The plain loop accumulates into separate gradients. Both loops alternate within a second, so that
    variations of the machine's speed, which reach several percent between windows, affect both equally.
    """

    def __init__(self, training: "TrainingRun", batches: list["MicroBatch"], denominator: float) -> None:
        self._training, self._denominator = training, denominator
        self._batches = iter(batches)
        self._gradients: dict[torch.Tensor, torch.Tensor | None] = {}
        self.passes: list[float] = []
        """Seconds of each bare forward and backward."""
        self.seconds = 0.0
        """Total seconds, including the exchange of the gradients."""

    def __call__(self) -> bool:
        began = time.perf_counter()
        theirs = self._exchange(self._gradients)
        batch = next(self._batches)
        passed = time.perf_counter()
        (self._training.replica.forward(batch).loss_sum / self._denominator).backward()
        self.passes.append(time.perf_counter() - passed)
        self._gradients = self._exchange(theirs)
        self.seconds += time.perf_counter() - began
        return False

    def _exchange(
        self, gradients: dict[torch.Tensor, torch.Tensor | None]
    ) -> dict[torch.Tensor, torch.Tensor | None]:
        before = {}
        for parameter in self._training.replica.model.parameters():
            before[parameter], parameter.grad = parameter.grad, gradients.get(parameter)
        return before


def overhead(requested: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The time of a window of 16 equal micro-batches without its optimizer, relative to 16 bare passes."""
    from workers.reporter import Reporter
    from workers.training import accumulate
    from workers.training.reporting.trackers import Trackers
    from workers.training.start import start

    run = create_run(
        folder,
        Path(requested["model"]),
        Path(requested["data"]),
        FixedSize(samples=4),
        1,
        requested["max_length"],
    )
    assignment = run.assignment()
    ratios = []
    with Reporter(run, 1) as reporter, Trackers((), assignment, run.path) as trackers:
        training, _ = start(run, assignment, reporter, trackers, lambda: False)
        training.state.progress.step = 1  # a window in which the noise scale is not measured
        window = training.next_window()
        denominator = training.loader.samples.denominator(window)
        batches = [training.loader.fetch(window[g].tolist()) for g in accumulate.divide(training, window)[0]]
        for number in range(requested["windows"] + 1):
            training.interrupted = bare = InterleavedBaseline(training, batches, denominator)
            began = time.perf_counter()
            trained = accumulate.train_window(training, window, denominator)
            ours = time.perf_counter() - began - bare.seconds - trained.result.optimizer_seconds
            if number:  # the first warms up
                ratios.append(ours / sum(bare.passes))
        training.loader.close()
    return {"micro_batches": len(batches), "ratios": ratios}


def main() -> None:
    requested = json.loads(sys.argv[1])
    torch.set_num_threads(requested.get("threads", 2))
    run = {"accrue": accrue, "overhead": overhead, "hugging_face": hugging_face}[requested["who"]]
    result = run(requested, Path(requested["folder"]))
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write("\nRESULT " + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
