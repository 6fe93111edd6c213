"""The true peak of the trainer's second window on the CPU, in a process of its own: prints it as JSON.

`python -m tests.benchmarks.true_peak '{"config": {...}, "rows": 4, ...}'`. With `ranks` and a `strategy`, it
is that of the first of several ranks, of which the others do not exist.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.contract.arguments import OPTIMIZER_ARGUMENTS
from app.contract.assignment import Assignment
from app.contract.model_reference import LoraSpec, ModelReference
from app.contract.objective import ObjectiveSpec
from app.contract.plan import FixedSize, Plan
from app.contract.spec import MethodSpec, Spec
from app.planning.architectures import from_config
from app.planning.devices import Device
from app.planning.recipes import recipe_of
from tests.harness.live_bytes import peak_of
from tests.harness.runs import with_ranks
from tests.harness.specs import cpu_plan, make_optimizer, make_spec
from workers.reporter import Reporter
from workers.run_directory import RunDirectory
from workers.training.accumulate import train_window
from workers.training.distributed.buckets import Buckets
from workers.training.distributed.group import ALONE, Group, ProcessGroup
from workers.training.fit import advance
from workers.training.models.head import head_of
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2
from workers.training.reporting.trackers import Trackers
from workers.training.start import start
from workers.training.training_run import TrainingRun

ROOT = Path(__file__).parents[2]
CPU = Device("cpu", "CPU", 2**40, "cpu")


class Inline(Executor):
    """Runs the loader's work on the calling thread: the profiler records only the thread that started it."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))
        return future


def prepare_run(requested: dict[str, Any], folder: Path) -> RunDirectory:
    """A model made from its config, data of full length, and a run directory for two windows."""
    folder.mkdir()
    ranks = requested.get("ranks", 1)
    examples = 2 * requested["rows"] * requested["micro_batches"] * ranks
    text = "".join(chr(97 + i % 26) for i in range(2 * requested["sequence"]))
    classes = requested["options"].get("classes", 0)
    data = write_lines(folder / "data.jsonl", [text] * examples, classes)
    spec = spec_of(requested, data, examples)
    plan = cpu_plan(spec, threads=2, rule=FixedSize(samples=requested["rows"]))
    run = create_run(folder, spec, plan, data, make_model(requested["config"], folder / "model"))
    if ranks > 1:
        with_ranks(run, [1 / ranks] * ranks, requested["strategy"], requested.get("stage", 3))
    return run


def write_lines(path: Path, texts: list[str], classes: int = 0) -> Path:
    """A training file of texts, whose labels are 0 to `classes` - 1 in turn; without labels if it is 0."""
    labels = [{"label": number % classes} if classes else {} for number in range(len(texts))]
    rows = ({"text": text, **label} for text, label in zip(texts, labels, strict=True))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def create_run(folder: Path, spec: Spec, plan: Plan, data: Path, model: Path) -> RunDirectory:
    """A run directory with an assignment."""
    run = RunDirectory(folder / "run")
    run.write_assignment(
        Assignment(
            job_id="ftjob-1", attempt=1, spec=spec, plan=plan, data_file=str(data), model_path=str(model)
        )
    )
    return run


def make_model(config: dict[str, Any], model: Path) -> Path:
    """A model with random weights from its config, and a byte-level tokenizer."""
    from workers.profiling.depth import config_for
    from workers.training.models.auto_class import auto_class

    ensure_tiny_gpt2(model)  # for its byte-level tokenizer
    for left in model.glob("*.safetensors"):
        left.unlink()
    torch.manual_seed(0)
    made = config_for(config)
    auto_class(made).from_config(made).save_pretrained(model)
    return model


def spec_of(requested: dict[str, Any], data: Path, examples: int) -> Spec:
    """The spec of a combination."""
    options = dict(requested["options"])
    optimizer = make_optimizer(options.pop("optimizer", "adamw"))
    if optimizer.name == "sgd":
        optimizer = optimizer.model_copy(update={"momentum": 0.9})
    assert set(OPTIMIZER_ARGUMENTS) >= {optimizer.name}
    lora = LoraSpec(r=8, alpha=16, dropout=0.0, target_modules=None, merge=False)
    method = MethodSpec(name="lora", lora=lora) if options.pop("method", None) == "lora" else None
    freeze, classes = options.pop("freeze", None), options.pop("classes", 0)
    spec = make_spec(
        model=ModelReference(name="case", source="local", architecture=from_config(requested["config"])),
        effective_batch_size=requested["rows"] * requested["micro_batches"] * requested.get("ranks", 1),
        max_steps=2,
        optimizer=optimizer,
        method=method or MethodSpec(name="full", lora=None),
        precision=options.pop("precision", "no"),
        attention=options.pop("attention", "sdpa"),
        gradient_checkpointing=options.pop("checkpointing", False),
        label_smoothing=0.1 if options.pop("smoothing", False) else 0.0,
        aux_scope=options.pop("aux_scope", "window"),
        freeze=(freeze,) if freeze else (),
        noise_scale_every=None,
        objective=ObjectiveSpec(name="classification") if classes else None,
    )
    own = spec.data.model_copy(
        update={
            "sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
            "examples": examples,
            "max_length": requested["sequence"],
            "packing": options.pop("packing", False),
            "format": "classification" if classes else "text",
            "classes": tuple(map(str, range(classes))),
        }
    )
    assert not options, f"unknown options {options}"
    return spec.model_copy(update={"data": own})


def held_bytes(training: TrainingRun) -> int:
    """The bytes of weights, buffers and optimizer states between two windows."""
    tensors = [*training.replica.model.parameters(), *training.replica.model.buffers()]
    for state in training.replica.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    gradients = training.replica.window._gradients
    if isinstance(gradients, Buckets):
        tensors += [bucket.sums for bucket in gradients._buckets]
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in own}
    return sum(storages.values())


def measure(run: RunDirectory, group: Group = ALONE) -> dict[str, Any]:
    """Trains one window, and measures the peak of the next."""
    assignment = run.assignment()
    with Reporter(run, 1) as reporter, Trackers((), assignment, run.path) as trackers:
        training, _ = start(run, assignment, reporter, trackers, lambda: False, group)
        training.loader.executor = Inline()  # type: ignore[assignment]
        advance(training)
        window = training.next_window()
        denominator = training.loader.samples.denominator(window)
        held = held_bytes(training)
        peak = peak_of(lambda: train_window(training, window, denominator))
        changed = [line for line in run.events.read_text().splitlines() if '"changed"' in line]
        own_logits = head_of(training.replica.model) is not None and training.replica.token_loss.head is None
        packed = training.loader.layout.packed
    return {
        "bytes": held + peak,
        "held_bytes": held,
        "recipe": recipe_of(assignment.spec, CPU).model_dump(mode="json") | {"packing": packed},
        "own_logits": own_logits,
        "changed": changed,
    }


class FirstOfSeveral(ProcessGroup):
    """Rank 0, whose exchanges return at once. So nothing is measured but what this rank itself allocates:
    gloo would copy what it exchanges, in other threads."""

    sum, any, broadcast, wait = Group.sum, Group.any, Group.broadcast, Group.wait  # type: ignore[assignment]
    begin_all_reduce, limited_waiting, waiting, close = (
        Group.begin_all_reduce,
        Group.limited_waiting,
        Group.waiting,
        Group.close,
    )  # type: ignore[assignment]
    note_window = Group.note_window

    def __init__(self, size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        self.rank, self.size, self.gradients = 0, size, dist.group.WORLD


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    size = told.get("ranks", 1)
    measured = measure(prepare_run(told, Path(told["folder"])), FirstOfSeveral(size) if size > 1 else ALONE)
    print("RESULT " + json.dumps(measured))
