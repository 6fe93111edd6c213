"""Models and data for the benchmarks: models made from configs, and the standard library's docstrings."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from app.cli import demo_data
from app.contract.assignment import Assignment
from app.contract.plan import MicroBatchRule
from app.contract.spec import RequestedSplit, Spec
from app.planning.architectures import from_config
from tests.harness.specs import cpu_plan, make_optimizer, make_schedule, make_spec
from workers.run_directory import RunDirectory
from workers.training.micro_batches.batches import epoch_order

VOCABULARY = 4096
EFFECTIVE_BATCH = 64
MAX_LENGTH = 512
SEED = 7
RATE = 3e-4


@dataclass(frozen=True)
class Size:
    """The layers and width of a Llama, and the number of windows that are timed."""

    layers: int
    width: int
    windows: int
    vocabulary: int = VOCABULARY
    max_length: int = MAX_LENGTH


SIZES = {"small": Size(4, 256, 8), "medium": Size(8, 512, 3)}


@cache
def docstrings() -> list[str]:
    return [sample.completion for sample in demo_data.samples()]


def write_docstrings(path: Path, samples: int, fixed: int | None = None) -> None:
    """Writes docstrings as texts. `fixed`: joins and recuts them so that each is longer than that many
    tokens."""
    texts = docstrings()
    order = np.random.default_rng(SEED).permutation(len(texts))
    if fixed is not None:
        joined = " ".join(texts[i] for i in order)
        texts = [joined[i : i + 12 * fixed] for i in range(0, len(joined), 12 * fixed)]
        order = np.arange(len(texts))
    chosen = [texts[i] for i in order if texts[i].strip()][:samples]
    assert len(chosen) == samples, f"only {len(chosen)} of {samples} samples"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))


def make_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE learned from the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>"]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0], pad_token=special[1])


def texts_in(path: Path) -> list[str]:
    """The texts of a training file."""
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def make_model(size: Size, folder: Path, texts: list[str]) -> None:
    """A Llama from its config, with a tokenizer learned from texts, in a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(texts)
    config = LlamaConfig(
        hidden_size=size.width, intermediate_size=size.width * 8 // 3, num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64, num_key_value_heads=size.width // 64,
        vocab_size=size.vocabulary, max_position_embeddings=size.max_length, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def create_run(
    folder: Path,
    model: Path,
    data: Path,
    cut: MicroBatchRule | None,
    windows: int,
    max_length: int,
    threads: int = 2,
) -> RunDirectory:
    """Creates a run directory for `windows` windows in one epoch's order; `cut` overrides the plan's rule."""
    examples = len(data.read_text().splitlines())
    spec: Spec = make_spec(
        seed=SEED,
        effective_batch_size=EFFECTIVE_BATCH,
        max_steps=windows,
        optimizer=make_optimizer("adamw", RATE),
        schedule=make_schedule("constant"),
        split=RequestedSplit(accumulation_steps=None, micro_batch_size=None, devices=1),
        save_every=10**6,
        certificate=True,
    )
    own = spec.data.model_copy(
        update={
            "sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
            "examples": examples,
            "max_length": max_length,
        }
    )
    spec = spec.model_copy(update={"data": own})
    architecture = from_config(json.loads((model / "config.json").read_text()))
    reference = spec.model.model_copy(update={"architecture": architecture})
    spec = spec.model_copy(update={"model": reference})
    if cut is None:  # what a job has by default
        spec = spec.model_copy(update={"tune": "while_training", "kernels": "auto"})
    run = RunDirectory(folder)
    plan = cpu_plan(spec, cut, threads=threads)
    run.write_assignment(
        Assignment(
            job_id="ftjob-bench", attempt=1, spec=spec, plan=plan,
            data_file=str(data), model_path=str(model),
        )
    )  # fmt: skip
    return run


def order_of_samples(samples: int) -> list[int]:
    """The order in which the trainer reads the samples in its first epoch."""
    order: list[int] = epoch_order(samples, SEED, 0).tolist()
    return order
