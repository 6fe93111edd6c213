"""One contestant of the trainer's benchmark, in a process of its own: prints its figures as JSON.

`python -m tests.benchmarks.contestants '{"who": "accrue", ...}'`
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from app.schemas.spec import Cut, FixedSize, TokenBudget
from tests.benchmarks.material import EFFECTIVE_BATCH, MAX_LENGTH, RATE, SEED, lay_run, order_of_samples


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Begins a new high-water mark; gives what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def accrue(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """This project's trainer, as a job runs it."""
    from workers.run_directory import Reporter
    from workers.training import certificate
    from workers.training.accumulate import StopRequested
    from workers.training.fit import train
    from workers.training.start import start
    from workers.training.trackers import Trackers

    rows, tokens = asked.get("rows"), asked.get("tokens")
    cut: Cut = FixedSize(samples=rows) if rows else TokenBudget(tokens=tokens)
    run = lay_run(folder, Path(asked["model"]), Path(asked["data"]), cut, asked["windows"])
    order = run.order()
    with Reporter(run, 1) as reporter, Trackers((), order, run.path) as trackers:
        training, _ = start(run, order, reporter, trackers, lambda: False)
        before = forget_peak()
        certificate.certify(training)
        try:
            train(training)
        except StopRequested:
            raise AssertionError("nobody asked it to stop") from None
        peak = resident("VmHWM")
        training.close()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return {
        "losses": [line["loss"] for line in lines],
        "times": [line["time"] for line in lines],
        "samples": [line["samples"] for line in lines],
        "peak_bytes": peak - before,
    }


def hugging_face(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
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
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], attn_implementation="sdpa")
    texts = [json.loads(line)["text"] for line in Path(asked["data"]).read_text().splitlines()]
    count = asked["windows"] * EFFECTIVE_BATCH
    ids = [[*tokenizer(texts[i]).input_ids, tokenizer.eos_token_id][:MAX_LENGTH]
           for i in order_of_samples(len(texts))[:count]]  # fmt: skip
    rows = [{"input_ids": row, "length": len(row)} for row in ids]

    class Times(TrainerCallback):  # type: ignore[misc]
        losses: list[float]

        def __init__(self) -> None:
            self.times: list[float] = []
            self.losses = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.time())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                self.losses.append(float(logs["loss"]))

    class Sequential(Trainer):  # type: ignore[misc]
        """The same samples in the same windows, which Trainer has no setting for."""

        def _get_train_sampler(self, *arguments: Any) -> Any:
            if asked["grouped"]:
                return super()._get_train_sampler(*arguments)
            return torch.utils.data.SequentialSampler(self.train_dataset)

    times = Times()
    trainer = Sequential(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=asked["rows"],
            gradient_accumulation_steps=EFFECTIVE_BATCH // asked["rows"], num_train_epochs=1,
            learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=SEED,
            train_sampling_strategy="group_by_length" if asked["grouped"] else "random",
            dataloader_pin_memory=False,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[times],
    )  # fmt: skip
    before = forget_peak()
    trainer.train()
    return {
        "losses": times.losses,
        "times": times.times,
        "samples": [EFFECTIVE_BATCH] * asked["windows"],
        "peak_bytes": resident("VmHWM") - before,
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(2)
    run = accrue if asked["who"] == "accrue" else hugging_face
    sys.stdout.write("\nRESULT " + json.dumps(run(asked, Path(asked["folder"]))) + "\n")


if __name__ == "__main__":
    main()
