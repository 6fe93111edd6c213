"""Parts of the acceptance test below a run: the environment, attention, the loss, memory, and whole steps."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from app.contract.memory_profile import Recipe
from app.contract.model_reference import LoraSpec
from app.contract.spec import RunPrecision
from app.planning.estimate import ByProfile
from tests.gpu.checks import Check, Place, at_least, at_most, processes
from tests.harness.specs import make_spec
from workers.training.devices.memory import begin_steps
from workers.training.gradients.gradient_sums import gradients_for
from workers.training.kernels import attention as kernels_of_attention
from workers.training.kernels.selection import installed_kernels
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import MicroBatch
from workers.training.models.head import backbone_of
from workers.training.models.precision import autocast
from workers.training.models.trainable import prepare_for_training
from workers.training.window import Clipping, Window

LORA = LoraSpec(r=16, alpha=32, dropout=0.0, target_modules=None, merge=False)

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024,
    "vocab_size": 50257,
}  # fmt: skip
ONE_BILLION: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
EIGHT_BILLION: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip

_SMALL: dict[str, Any] = {
    **EIGHT_BILLION, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip

_PACKAGES = (
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "liger-kernel",
    "flash-attn",
    "torchao",
    "unsloth",
)

_H200_LORA_8B, _H200_FULL_1B = 12_500.0, 45_000.0
"""Tokens per second that the issue asks for on an H200."""


def environment(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """Versions, and whether CUDA is what a trainer expects."""
    figures |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for name in _PACKAGES:
        try:
            figures[name] = version(name)
        except PackageNotFoundError:
            figures[name] = None
    if not place.is_gpu:
        return
    properties = torch.cuda.get_device_properties(0)
    figures |= {
        "name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda,
        "capability": list(torch.cuda.get_device_capability()), "cudnn": torch.backends.cudnn.version(),
        "bf16": torch.cuda.is_bf16_supported(),
    }  # fmt: skip
    figures["context_bytes"] = context_bytes(place)
    yield Check("bf16", str(figures["bf16"]), "True", figures["bf16"])


def attention(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """Which kernel runs, by precision, grouped heads and mask; and what the second call costs at 50 shapes,
    since micro-batches rarely have the same shape twice."""
    lengths = range(64, 64 + 50 * 8, 8) if place.is_gpu else range(16, 36, 4)
    precisions: tuple[RunPrecision, ...] = ("fp32", "bf16")
    for precision, grouped, masked in product(precisions, (False, True), (False, True)):
        kernels_of_attention.choose_kernels(precision, deterministic=False)
        seconds = []
        for length in lengths:
            call = _attention_call(place, precision, length, grouped=grouped, masked=masked)
            call()
            place.wait()
            began = time.perf_counter()
            call()
            place.wait()
            seconds.append(time.perf_counter() - began)
        name = f"{precision}, {'grouped' if grouped else 'all'} heads, {'mask' if masked else 'causal'}"
        figures[name] = {"second_call_seconds": median(seconds), "kernels": _kernels(place, call)}
        if place.is_gpu and not masked:
            used = " ".join(figures[name]["kernels"])
            wanted = "flash" if precision == "bf16" else "efficient"
            yield Check(f"kernel for {name}", used or "none seen", wanted, wanted in used)


def _attention_call(
    place: Place, precision: RunPrecision, length: int, *, grouped: bool, masked: bool
) -> Callable[[], None]:
    """Forward and backward of attention over 8 heads of width 64, with 2 for keys and values if grouped."""
    repeats = kernels_of_attention.repeats_heads(place.kind, precision)
    query, key = (_states(place, precision, length, heads) for heads in (8, 2 if grouped else 8))
    if grouped and repeats:
        key = key.repeat_interleave(4, dim=1)
    mask = torch.ones(length, length, dtype=torch.bool, device=place.device).tril() if masked else None

    def call() -> None:
        found = F.scaled_dot_product_attention(
            query, key, key, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped and not repeats
        )
        torch.autograd.grad(found.sum(), (query, key))

    return call


def _states(place: Place, precision: RunPrecision, length: int, heads: int) -> torch.Tensor:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return torch.randn(2, heads, length, 64, device=place.device, dtype=dtype, requires_grad=True)


def _kernels(place: Place, call: Any) -> list[str]:
    """The attention operators that a call ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
        place.wait()
    names = {event.key for event in profiler.key_averages() if "_attention" in event.key}
    return sorted(name for name in names if name.startswith("aten::_"))


def context_bytes(place: Place) -> int:
    """What this process holds on the GPU besides tensors, once it has multiplied matrices; it must be the
    only one there."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(256, 256, device=place.device, dtype=dtype, requires_grad=True)
        (square @ square).sum().backward()
    place.wait()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class Case(NamedTuple):
    """A model and a recipe whose memory is measured."""

    config: dict[str, Any]
    options: dict[str, Any]
    """Fields of the recipe."""
    rows: int
    sequence: int

    @property
    def name(self) -> str:
        model = f"{self.config['model_type']} {self.config.get('hidden_size', 768)}"
        return f"{model} {self.options} {self.rows} × {self.sequence}"


RECIPES = (
    Case(LLAMA, {"precision": "bf16"}, 4, 1024),
    Case(LLAMA, {"precision": "bf16"}, 16, 512),
    Case(LLAMA, {"precision": "bf16", "gradient_checkpointing": True}, 16, 1024),
    Case(LLAMA, {"precision": "bf16", "lora": LORA}, 8, 1024),
    Case(LLAMA, {"precision": "bf16", "lora": LORA, "gradient_checkpointing": True}, 16, 1024),
    Case(LLAMA, {"precision": "pure_bf16"}, 8, 1024),
    Case(LLAMA, {"precision": "fp32"}, 4, 1024),
    Case(LLAMA, {"precision": "fp16"}, 8, 512),
    Case(LLAMA, {"precision": "bf16", "optimizer": "sgd"}, 8, 1024),
    Case(GPT2, {"precision": "bf16"}, 8, 1024),
    Case(GPT2, {"precision": "bf16", "gradient_checkpointing": True}, 16, 1024),
    Case(ONE_BILLION, {"precision": "bf16"}, 4, 1024),
)


def memory(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """Predicted against allocated and reserved memory, and that of the process, over 12 recipes."""
    with processes() as alone:
        others = _used()
        context = alone.submit(_context_alone, place).result() - others
        common = {"expandable_segments": uses_expandable_segments(), "context_bytes": context}
        recipes = [Recipe(device="cuda", **common, **case.options) for case in RECIPES]
        asked = [(case.config, recipe, case.sequence) for case, recipe in zip(RECIPES, recipes, strict=True)]
        figures["context_bytes"] = context
        errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "process": []}
        with _predictions(asked) as predictions:
            for case, recipe, predict in zip(RECIPES, recipes, predictions, strict=True):
                job = (place, case.config, recipe, case.rows, case.sequence, 4)
                true = alone.submit(peaks, *job).result()
                true["process"] -= others
                predicted = predict().memory(case.rows, accumulating=True)
                expected = {
                    "allocated": predicted.peak_allocated_bytes,
                    "reserved": predicted.peak_reserved_bytes,
                    "process": predicted.peak_process_bytes,
                }
                figures[case.name] = {"true": true, "predicted": expected}
                for kind, found in errors.items():
                    found.append(expected[kind] / true[kind] - 1)
    for kind, found in errors.items():
        yield at_most(f"largest error of {kind} memory", max(map(abs, found)), 0.03)


def _used() -> int:
    """Bytes of the GPU that processes use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def _context_alone(place: Place) -> int:
    """Bytes of the GPU in use with this process's context."""
    context_bytes(place)
    return _used() - torch.cuda.memory_reserved()


Asked = tuple[dict[str, Any], Recipe, int]
"""A model's config, a recipe, and the tokens of a row."""


@contextmanager
def _predictions(asked: Sequence[Asked]) -> Iterator[list[Callable[[], ByProfile]]]:
    """The estimates, each computed in a process of its own while the GPU is measured."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        futures = [processes.submit(_prediction, each) for each in asked]
        yield [future.result for future in futures]


def _prediction(asked: Asked) -> ByProfile:
    from workers.profiling.profile import make_profile

    config, recipe, sequence = asked
    torch.set_num_threads(1)
    return ByProfile(make_profile(config, recipe, sequence).curve, recipe, "simulated")


def uses_expandable_segments() -> bool:
    """Whether this process's environment turns them on."""
    options = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable_segments:true" in options.replace(" ", "").lower()


def peaks(
    place: Place, config: dict[str, Any], recipe: Recipe, rows: int, sequence: int, micro_batches: int
) -> dict[str, int]:
    """Bytes at the peak of the windows of a real model on the GPU, after a first one, as a trainer makes for
    its certificate; `process` includes what other processes use."""
    step = Step(place, config, recipe, rows, sequence)
    step.window_of(micro_batches)
    place.wait()
    begin_steps(place.device)
    for _ in range(2):
        step.window_of(micro_batches)
    place.wait()
    found = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "process": _used(),
    }
    step.release()
    return found


def steps(place: Place, figures: dict[str, Any]) -> Iterator[Check]:
    """Tokens per second of full fine-tuning of one billion parameters, and of LoRA of eight billion, with
    PyTorch's operators and with those kernels that are installed (kernels.py); and the loss's share of a
    pass."""
    for label, config, recipe, rows, sequence, bound in _stepped(place):
        place.clear()
        step = Step(place, config, recipe, rows, sequence)
        flops = 6.0 if recipe.lora is None else 4.0
        count = sum(parameter.numel() for parameter in step.model.parameters())
        for kernels in ("PyTorch's operators", "installed kernels"):
            used = step.use_kernels() if kernels == "installed kernels" else []
            step.window_of(2)
            place.wait()
            began = time.perf_counter()
            step.window_of(6)
            place.wait()
            rate = 6 * rows * sequence / (time.perf_counter() - began)
            whole, without = _timed(place, step.whole_pass), _timed(place, step.pass_without_loss)
            figures[f"{label}, {kernels}"] = {
                "tokens_per_second": rate, "tflops": flops * count * rate / 1e12, "kernels": used,
                "loss_share": 1 - without / whole,
            }  # fmt: skip
        step.release()
        if place.is_gpu and "H200" in torch.cuda.get_device_name():
            yield at_least(f"tokens/s of {label}", rate, bound)
        if recipe.lora is not None and place.is_gpu:
            yield at_most(f"the loss's share of a pass of {label}", 1 - without / whole, 0.15)
        del step


def _stepped(place: Place) -> list[tuple[str, dict[str, Any], Recipe, int, int, float]]:
    """What `steps` measures: a name, the model, the recipe, rows, tokens of each row, and the least tokens
    per second on an H200. LoRA only where there is memory for it."""
    if not place.is_gpu:
        return [("a small model", _SMALL, Recipe(device="cpu", precision="fp32", lora=LORA), 1, 256, 0.0)]
    full = Recipe(device="cuda", precision="pure_bf16")
    lora = Recipe(device="cuda", precision="pure_bf16", lora=LORA)
    cases = [("full 1B", ONE_BILLION, full, 8, 4096, _H200_FULL_1B)]
    if torch.cuda.get_device_properties(0).total_memory >= 60 * 2**30:
        cases.append(("LoRA 8B", EIGHT_BILLION, lora, 2, 4096, _H200_LORA_8B))
    return cases


class Step:
    """A model on the device with a window, for steps without a run."""

    def __init__(
        self, place: Place, config: dict[str, Any], recipe: Recipe, rows: int, sequence: int
    ) -> None:
        kernels_of_attention.choose_kernels(recipe.precision, deterministic=False)
        dtype = torch.bfloat16 if recipe.precision == "pure_bf16" else torch.float32
        self.model = prepare_for_training(
            _model(config, dtype, place), lora=recipe.lora, seed=0,
            gradient_checkpointing=recipe.gradient_checkpointing, freeze=(), precision=recipe.precision,
        )  # fmt: skip
        parameters = list(self.model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(trained, lr=1e-4, fused=True)
            if recipe.optimizer == "sgd"
            else torch.optim.AdamW(trained, lr=1e-4, fused=True)
        )
        self._gradients = gradients_for(parameters, in_fp32=True, host=None)
        self._window = Window(parameters, optimizer, Clipping(1.0), gradients=self._gradients)
        self._loss, self._precision, self._place = TokenLoss(self.model), recipe.precision, place
        keeps = not recipe.gradient_checkpointing
        self._in_precision = partial(autocast, recipe.precision, place.kind, keeps_copies=keeps)
        self._batch = _batch(place, config, rows, sequence)

    def release(self) -> None:
        """Removes the hooks, which would keep the model in memory."""
        self._gradients.release()

    def use_kernels(self) -> list[str]:
        """Switches on the kernels that a trainer would use, and returns their names."""
        replica: Any = SimpleNamespace(
            device=self._place.device, model=self.model, token_loss=self._loss, precision=self._precision,
            is_sharded=False,
        )  # fmt: skip
        found = installed_kernels(replica, make_spec(kernels="auto"), packed=False, longest=0)
        for each in found:
            each.switch_on()
        return [each.name for each in found]

    def whole_pass(self) -> None:
        """Forward and backward of a micro-batch; nothing is applied."""
        with self._in_precision():
            summed = self._loss(self._batch).loss_sum
        summed.backward()

    def pass_without_loss(self) -> None:
        """Forward and backward of all layers before the output head."""
        with self._in_precision():
            output = backbone_of(self.model)(input_ids=self._batch.input_ids, use_cache=False)
            summed = output.last_hidden_state.sum()
        summed.backward()

    def window_of(self, micro_batches: int) -> None:
        """One optimizer step."""
        self._window.open(float(len(self._batch.targets) * micro_batches))
        for _ in range(micro_batches):
            with self._in_precision():
                summed = self._loss(self._batch).loss_sum
            self._window.add(summed)
        assert self._window.close().applied


def _model(config: dict[str, Any], dtype: torch.dtype, place: Place) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with place.device:
        return AutoModelForCausalLM.from_config(made, dtype=dtype)


def _batch(place: Place, config: dict[str, Any], rows: int, sequence: int) -> MicroBatch:
    ids = torch.randint(0, config["vocab_size"], (rows, sequence))
    predicted = torch.cat([row * sequence + torch.arange(sequence - 1) for row in range(rows)])
    batch = MicroBatch(ids, predicted, ids.flatten()[predicted + 1], (sequence,) * rows)
    return batch.to(place.device)


def _timed(place: Place, call: Any) -> float:
    """The median of five calls, after one that warms up; seconds."""
    seconds = []
    for _ in range(6):
        place.wait()
        began = time.perf_counter()
        call()
        place.wait()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])
