"""Parts of the acceptance test that train: beside Trainer, resumed, certified, and with every feature."""

import shutil
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.contract.model_reference import LoraSpec
from app.contract.plan import FixedSize, TokenBudget
from app.contract.spec import MethodSpec, RunPrecision
from tests.gpu.checks import (
    Check,
    Place,
    at_least,
    at_most,
    events_of,
    log_of,
    processes,
    spec_with,
    train,
    train_until_killed,
)
from tests.harness.preferences import OBJECTIVES, objective_spec, preference_data, write_preferences
from tests.harness.specs import make_optimizer, make_schedule
from workers.run_directory import RunDirectory

LORA = LoraSpec(r=8, alpha=16, dropout=0.0, target_modules=None, merge=False)

_EFFECTIVE_BATCH = 64
_TOLERANCE = {"fp32": 1e-5, "tf32": 2e-2, "bf16": 2e-2, "fp16": 2e-2}


def _llama(layers: int, width: int, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 8 * width // 3 // 64 * 64 or 64,
        "num_hidden_layers": layers, "num_attention_heads": max(1, width // 64),
        "num_key_value_heads": max(1, width // 128), "vocab_size": 512, "max_position_embeddings": 1024,
        "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257, **changes,
    }  # fmt: skip


def throughput(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """Samples per second beside transformers' Trainer, at a fixed length and at lengths like Alpaca's, in
    turns."""
    config = _llama(16, 1024, vocab_size=32000) if place.is_gpu else _llama(2, 128)
    model = place.model("throughput", config)
    windows, precision = (20, "bf16") if place.is_gpu else (4, "fp32")
    count = windows * _EFFECTIVE_BATCH
    random = np.random.default_rng(11)
    alike = np.clip(random.lognormal(4.3, 0.6, count), 8, 900 if place.is_gpu else 200).astype(int).tolist()
    cases = {"fixed": [510 if place.is_gpu else 62] * count, "like Alpaca's": alike}
    for name, lengths in cases.items():
        ours: list[float] = []
        theirs: dict[int, list[float]] = {8: [], 32: []}
        for turn in range(2):
            rows = FixedSize(samples=32) if name == "fixed" else TokenBudget(tokens=32 * 512)
            if not place.is_gpu:
                rows = FixedSize(samples=8) if name == "fixed" else TokenBudget(tokens=512)
            name_of_run = f"speed-{len(figures)}-{turn}"
            ours.append(_ours(place, name_of_run, model, lengths, rows, windows, precision))
            for each in theirs if turn == 0 else (32,):
                few = lengths[: max(2, windows // 4) * _EFFECTIVE_BATCH]  # its speed does not change
                theirs[each].append(_theirs(place, model, few, each, precision))
        best = max(max(rates) for rates in theirs.values())
        figures[name] = {"accrue": ours, "trainer": theirs, "last_run": _summary(place, name_of_run)}
        bound = 1.0 if name == "fixed" else 1.3
        if place.is_gpu:
            yield at_least(f"speed relative to Trainer, {name} lengths", max(ours) / best, bound)


def _summary(place: Place, name: str) -> dict[str, Any]:
    """How a run has cut its windows, the time of each, and what it reported about that."""
    run = RunDirectory(place.folder / name)
    log = log_of(run)
    messages = [
        event["message"] for kind in ("kernels", "unpadded", "fixed_cost") for event in events_of(run, kind)
    ]
    micro_batches = np.diff([0, *(line["micro_step"] for line in log)]).tolist()
    seconds = np.diff([line["time"] for line in log]).round(4).tolist()
    return {"micro_batches": micro_batches, "seconds": seconds, "events": messages}


def _ours(
    place: Place, name: str, model: Path, lengths: list[int], rule: Any, windows: int, precision: Any
) -> float:
    """Samples per second in the second half of the windows, after the job has adapted to the device."""
    spec = spec_with(
        effective_batch_size=_EFFECTIVE_BATCH, max_steps=windows, certificate=False, save_every=10**6,
        noise_scale_every=None, schedule=make_schedule("constant"), kernels="auto", tune="while_training",
        precision="bf16" if precision == "bf16" else "no",
    )  # fmt: skip
    run = place.run(name, spec, model=model, lengths=lengths, precision=precision, rule=rule)
    train(run)
    log = log_of(run)
    half = len(log) // 2
    return sum(line["samples"] for line in log[half:]) / (log[-1]["time"] - log[half - 1]["time"])


def _theirs(place: Place, model: Path, lengths: list[int], rows: int, precision: str) -> float:
    """Trainer's samples per second, after its first step."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    made = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
    random = np.random.default_rng(3)
    data = [{"input_ids": random.integers(0, 255, length + 1).tolist()} for length in lengths]

    class Times(TrainerCallback):  # type: ignore[misc]
        ended: list[float]

        def __init__(self) -> None:
            self.ended = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            place.wait()
            self.ended.append(time.time())

    times = Times()
    trainer = Trainer(
        model=made,
        args=TrainingArguments(
            output_dir=str(place.folder / "trainer"), per_device_train_batch_size=rows,
            gradient_accumulation_steps=_EFFECTIVE_BATCH // rows, num_train_epochs=1, learning_rate=1e-4,
            lr_scheduler_type="constant", max_grad_norm=1.0, save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=not place.is_gpu, bf16=precision == "bf16" and place.is_gpu,
            logging_strategy="no", optim="adamw_torch_fused", dataloader_pin_memory=place.is_gpu,
        ),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[times],
    )  # fmt: skip
    trainer.train()
    return _EFFECTIVE_BATCH * (len(times.ended) - 1) / (times.ended[-1] - times.ended[0])


def reads(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """How often the host waits for the device in each window, by PyTorch's own count: those of a long run
    less those of a short one, since loading and saving wait too."""
    waits: list[Counter[str]] = []
    micro_batches = []

    def noted(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            own = [frame for frame in traceback.extract_stack() if "workers/training" in frame.filename]
            waits[-1][f"{Path(own[-1].filename).name}: {own[-1].name}" if own else "elsewhere"] += 1

    for steps in (4, 12):
        spec = spec_with(max_steps=steps, certificate=False, noise_scale_every=None, save_every=10**6)
        run = place.run(f"reads-{steps}", spec, precision="bf16", rule=FixedSize(samples=2))
        waits.append(Counter())
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = noted
            torch.cuda.set_sync_debug_mode("warn")
            try:
                train(run)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        micro_batches.append(log_of(run)[-1]["micro_step"])
    short, long = waits
    in_windows, count = long - short, micro_batches[1] - micro_batches[0]
    figures |= {"in_windows": dict(in_windows), "micro_batches": count, "others": dict(short)}
    yield at_most("waits per micro-batch", in_windows.total() / count, 1.0)


def resume(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """A stopped run and a killed one beside one that went through: bit-identical where kernels are
    deterministic, as on a CPU; otherwise the difference of the weights is reported."""
    for deterministic in (False, True):
        spec = spec_with(max_steps=12, certificate=False, deterministic=deterministic, precision="bf16")
        precision: RunPrecision = "bf16" if place.is_gpu else "fp32"
        rule = FixedSize(samples=3)
        name = f"deterministic-{deterministic}"
        whole = place.run(f"whole-{name}", spec, precision=precision, rule=rule)
        train(whole)
        exact = deterministic or not place.is_gpu
        for fault in ("stopped", "killed"):
            run = place.run(f"{fault}-{name}", spec, precision=precision, rule=rule)
            if fault == "killed":
                train_until_killed(run, 30)
            else:
                assert train(run, stop_after=30) is None, "the run ended before it was stopped"
            train(place.run(f"{fault}-{name}", spec, precision=precision, rule=rule, attempt=2))
            difference = figures[f"{fault}, {name}"] = _difference(whole.model, run.model)
            yield at_most(f"difference after a run was {fault}, {name}", difference, 0.0 if exact else 1e-2)
            place.clear()


def _difference(one: Path, other: Path) -> float:
    """The difference of two models' weights, relative to their norm."""
    from safetensors.torch import load_file

    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    apart = sum(float((first[name].double() - second[name].double()).square().sum()) for name in second)
    return float((apart / sum(float(weight.double().square().sum()) for weight in second.values())) ** 0.5)


def certificates(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """The certificate's error over depth and precision: none may fail, and none may come near failing."""
    depths = (2, 8, 24) if place.is_gpu else (2, 6)
    precisions: tuple[RunPrecision, ...] = (
        ("fp32", "tf32", "bf16", "fp16") if place.is_gpu else ("fp32", "bf16")
    )
    for depth in depths:
        model = place.model(f"depth-{depth}", _llama(depth, 256))
        for precision in precisions:
            name = f"{depth} layers, {precision}"
            spec = spec_with(max_steps=1, schedule=make_schedule("constant"))
            run = place.run(
                f"certificate-{depth}-{precision}", spec, model=model, precision=precision,
                rule=TokenBudget(tokens=256),
            )  # fmt: skip
            began = time.perf_counter()
            train(run)
            (event,) = events_of(run, "certificate")
            error = float(event["data"]["gradient_error"])
            figures[name] = {**event["data"], "seconds": time.perf_counter() - began}
            yield at_most(f"certificate, {name}", error, _TOLERANCE[precision])


def features(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """Five steps with each feature; the loss must be finite, and what is not installed is left out."""
    lora, qlora = MethodSpec(name="lora", lora=LORA), MethodSpec(name="qlora", lora=LORA)
    cases: dict[str, tuple[RunPrecision, dict[str, Any]]] = {
        "full": ("fp32", {}),
        "bf16": ("bf16", {}),
        "pure bf16": ("pure_bf16", {"precision": "pure_bf16"}),
        "lora": ("bf16", {"method": lora}),
        "checkpointing": ("bf16", {"gradient_checkpointing": True}),
        "label smoothing": ("bf16", {"label_smoothing": 0.1}),
        "packing": ("bf16", {"data": spec_with().data.model_copy(update={"packing": True})}),
        "gradients on the host": ("bf16", {"accumulate_gradients_on_cpu": True}),
        "optimizer on the host": ("bf16", {"use_cpu_offload": True}),
        "eager attention": ("bf16", {"attention": "eager"}),
        "profile": ("bf16", {"profile": True}),
        "sgd": ("bf16", {"optimizer": make_optimizer("sgd")}),
        "tuning": ("bf16", {"tune": "first"}),
    }
    if place.is_gpu:
        cases |= {
            "fp16": ("fp16", {"precision": "fp16"}),
            "tf32": ("tf32", {"precision": "tf32"}),
        }
        cases[_KERNELS] = ("bf16", {"kernels": "auto"})
        if find_spec("bitsandbytes"):
            cases["qlora"] = ("bf16", {"method": qlora})
            cases["adamw_8bit"] = ("bf16", {"optimizer": make_optimizer("adamw_8bit")})
    for objective in OBJECTIVES:
        changes = {"objective": objective_spec(objective), "data": preference_data(objective, 24)}
        cases[objective] = ("bf16", changes)
    if find_spec("pytorch_optimizer"):
        cases["lion"] = ("bf16", {"optimizer": make_optimizer("lion")})
    if place.is_gpu:
        cases["compile"] = ("bf16", {"compile": True})  # takes the longest
    model = place.model("features", _llama(2, 128))
    for name, (precision, changes) in cases.items():
        began = time.perf_counter()
        try:
            asked = (place, f"feature-{name.replace(' ', '-')}", model, precision, changes)
            if name in ("compile", _KERNELS):  # kernels that are used stay in the modules of their process
                with processes() as alone:
                    found = alone.submit(_five_steps, *asked).result()
            else:
                found = _five_steps(*asked)
            losses, used, unpadded = found["losses"], found["used"], found["unpadded"]
            yield Check(
                name, f"{losses[-1]:.4f}", "5 finite losses", len(losses) == 5 and all(np.isfinite(losses))
            )
            if name == _KERNELS:
                yield Check("kernels that are used", str(used), "all", bool(used) and all(used))
                yield Check("samples are not padded", str(unpadded), "True", unpadded)
            figures[name] = {**found, "seconds": time.perf_counter() - began}
        except Exception as error:
            yield Check(name, f"{type(error).__name__}: {str(error)[:200]}", "5 finite losses", False)
        place.clear()


_KERNELS = "installed kernels"


def _five_steps(
    place: Place, folder: str, model: Path, precision: RunPrecision, changes: dict[str, Any]
) -> dict[str, Any]:
    """The losses of five steps, and which kernels of other packages were used."""
    spec, data = spec_with(max_steps=5, **changes), None
    if spec.objective is not None:
        data = write_preferences(place.folder / f"{folder}.jsonl", spec.objective.name)
    run = place.run(folder, spec, model=model, precision=precision, data=data)
    train(run)
    kernels = events_of(run, "kernels")
    found = {
        "losses": [line["loss"] for line in log_of(run)],
        "used": [event["data"]["used"] for event in kernels],
        "messages": [event["message"] for event in kernels],
        "unpadded": any(event["data"]["used"] for event in events_of(run, "unpadded")),
    }
    shutil.rmtree(run.path, ignore_errors=True)
    return found


def out_of_memory(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """A run whose planned micro-batch does not fit under a cap: it must go on with smaller ones, and train
    the same."""
    model = place.model("memory", _llama(4, 512, vocab_size=32000))
    lengths = [510] * 128
    spec = spec_with(effective_batch_size=64, max_steps=4, save_every=10**6, precision="bf16")
    asked: dict[str, Any] = {"model": model, "lengths": lengths, "precision": "bf16"}
    free = place.run("uncapped", spec, rule=TokenBudget(tokens=64 * 512), **asked)
    train(free)
    place.clear()
    used = int(max(line["peak_gb"] for line in log_of(free)) * 2**30)
    capped = place.run("capped", spec, rule=TokenBudget(tokens=64 * 512), limit_bytes=used // 2, **asked)
    train(capped)
    failures = len(events_of(capped, "out_of_memory"))
    difference = _difference(free.model, capped.model)
    figures |= {"failures": failures, "peak_bytes": used, "difference": difference}
    yield at_least("replays after running out of memory", float(failures), 1.0)
    yield at_most("difference of the weights", difference, 1e-2)
