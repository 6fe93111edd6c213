"""Runs Hugging Face Trainer on a few samples, and records gradients, losses and norms."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

Sample = dict[str, list[int]]


@dataclass
class Record:
    """What happened at each optimizer step."""

    gradients: list[Tensor] = field(default_factory=list)
    """Each as one vector, as the optimizer received it."""
    samples: list[list[int]] = field(default_factory=list)
    """The first token of each sample since the previous step."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def sample_of(tokens: Any, counts: Any) -> Sample:
    """A sample with its labels; the first token is never predicted, so its label is left out."""
    labels = [int(t) if c and i else -100 for i, (t, c) in enumerate(zip(tokens, counts, strict=True))]
    return {"input_ids": [int(t) for t in tokens], "labels": labels}


def padded(samples: list[Sample]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def rows(name: str, fill: int) -> Tensor:
        return torch.tensor([s[name] + [fill] * (longest - len(s[name])) for s in samples])

    mask = torch.tensor([[int(i < len(s["input_ids"])) for i in range(longest)] for s in samples])
    return {"input_ids": rows("input_ids", 0), "labels": rows("labels", -100), "attention_mask": mask}


class Stream(IterableDataset):  # type: ignore[misc]
    """A dataset that does not know its length."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)


def run_trainer(
    model: Any, samples: list[Sample] | Stream, folder: Path, *, rows: int, accumulate: int, **arguments: Any
) -> Record:
    """Trains with SGD in the order of the samples, so that weight changes show what the optimizer
    received."""
    record = Record()
    seen: list[int] = []

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                record.losses.append(float(logs["loss"]))
                record.norms.append(float(logs["grad_norm"]))
                record.rates.append(float(logs["learning_rate"]))

    class SequentialTrainer(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return None if isinstance(samples, Stream) else SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: dict[str, Tensor], *others: Any, **named: Any) -> Any:
            seen.extend(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *others, **named)

    resume = arguments.pop("resume", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.pop("rate", 0.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, arguments.pop("factor", lambda step: 1.0))

    def noted(*_: Any) -> None:
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        record.gradients.append(torch.cat([grad.flatten().double() for grad in grads]).clone())
        record.samples.append(list(seen))
        seen.clear()

    optimizer.register_step_pre_hook(noted)
    defaults: dict[str, Any] = {"max_grad_norm": 0.0, "save_strategy": "no", "num_train_epochs": 1}
    trainer = SequentialTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=rows, gradient_accumulation_steps=accumulate,
            logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
            **{**defaults, **arguments},
        ),
        train_dataset=samples,
        data_collator=padded,
        optimizers=(optimizer, schedule),
        callbacks=[Recorder()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return record
