"""`make accuracy`: compares simulated with true peak memory, over model families and options.

Without a GPU, the true peak is that of live tensor bytes during the trainer's second window on the CPU: the
bytes of weights and optimizer states, plus what the allocator reports to PyTorch's profiler. This verifies
the bookkeeping, but nothing about GPUs. It writes results/accuracy.json, accuracy.md and accuracy.png. With
`--draw 60 --seed 1` it compares random combinations instead, and writes nothing.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from random import randrange
from statistics import fmean, quantiles
from typing import Any

from app.contract.spec import Strategy, ZeroStage
from app.planning.families import OWN_LOGITS
from tests.benchmarks.true_peak import ROOT

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
PRINT_SHAPE_ABOVE = 0.01
"""The shape of a random model is printed if its relative error is larger than this."""

_SIZES: dict[str, Any] = {
    "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 7, "num_attention_heads": 5,
    "num_key_value_heads": 5, "vocab_size": 16384, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 7, "n_embd": 320, "n_head": 5, "n_positions": 512,
             "vocab_size": 16384, "resid_pdrop": 0.1, "attn_pdrop": 0.0, "embd_pdrop": 0.1,
             "bos_token_id": 0, "eos_token_id": 0},
    "llama": {**_SIZES, "model_type": "llama"},
    "qwen2": {**_SIZES, "model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen3": {**_SIZES, "model_type": "qwen3", "head_dim": 64},
    "mistral": {**_SIZES, "model_type": "mistral", "sliding_window": 64},
    "gemma2": {**_SIZES, "model_type": "gemma2", "head_dim": 64, "sliding_window": 4096,
               "tie_word_embeddings": True},
    "gemma3": {**_SIZES, "model_type": "gemma3_text", "head_dim": 64, "sliding_window": 64,
               "tie_word_embeddings": True},
    "phi3": {**_SIZES, "model_type": "phi3", "sliding_window": None},
    "opt": {"model_type": "opt", "hidden_size": 320, "ffn_dim": 1280, "num_hidden_layers": 7,
            "num_attention_heads": 5, "vocab_size": 16384, "max_position_embeddings": 512,
            "word_embed_proj_dim": 320, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0},
    "gpt_neox": {**_SIZES, "model_type": "gpt_neox", "intermediate_size": 1280},
    "bloom": {"model_type": "bloom", "hidden_size": 320, "n_layer": 7, "n_head": 5, "vocab_size": 16384,
              "seq_length": 512, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0},
    "falcon": {"model_type": "falcon", "hidden_size": 320, "num_hidden_layers": 7,
               "num_attention_heads": 5, "vocab_size": 16384, "multi_query": True, "bos_token_id": 0,
               "eos_token_id": 0},
    "mixtral": {**_SIZES, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                "intermediate_size": 512, "sliding_window": None},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One combination: a family, a micro-batch, a length, the micro-batches of a window, and options."""

    family: str
    rows: int = 4
    sequence: int = 128
    micro_batches: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    """Fields that override the family's config."""
    ranks: int = 1
    strategy: Strategy = "ddp"
    stage: ZeroStage = 3

    @property
    def config(self) -> dict[str, Any]:
        return {**(FAMILIES.get(self.family) or _small(self.family)), **self.shape}

    @property
    def label(self) -> str:
        options = ", ".join(f"{name} {value}" if value is not True else name
                            for name, value in self.options.items())  # fmt: skip
        divided = f"ZeRO stage {self.stage}" if self.strategy == "fsdp" else self.strategy
        ranks = f"{divided} on {self.ranks} ranks" if self.ranks > 1 else ""
        return ", ".join(filter(None, (ranks, options))) or "full, AdamW, fp32"


def _small(family: str) -> dict[str, Any]:
    """A small config of any family, with enough layers that the simulation builds only some of them."""
    from tests.harness.any_family import LAYERS, small_config

    layers = 2 if family in ("gpt_neo", "lfm2_moe") else 6  # whose configs list the kinds of layers
    config: dict[str, Any] = json.loads(
        small_config(family, **dict.fromkeys(LAYERS, layers)).to_json_string(use_diff=False)
    )
    return config


OTHER_FAMILIES = (
    "glm4v",
    "internvl",
    "llava",
    "mistral3",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "afmoe",
    "apertus",
    "arcee",
    "bamba",
    "bert",
    "biogpt",
    "codegen",
    "cohere",
    "cohere2",
    "ctrl",
    "deepseek_v3",
    "diffllama",
    "doge",
    "dots1",
    "ernie4_5",
    "exaone4",
    "falcon_h1",
    "falcon_mamba",
    "gemma",
    "gemma3",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_oss",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "jamba",
    "lfm2",
    "mamba",
    "mamba2",
    "minimax",
    "ministral",
    "modernbert-decoder",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "openai-gpt",
    "persimmon",
    "phi",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "recurrent_gemma",
    "rembert",
    "roberta",
    "rwkv",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "xglm",
    "zamba2",
)
"""Families without a rule of their own: attention of all kinds, state spaces, hybrids, mixtures."""

CASES = [
    *(Case(family) for family in FAMILIES),
    Case("llama", rows=1),
    Case("llama", rows=16, sequence=64),
    Case("llama", rows=2, sequence=512),
    Case("llama", micro_batches=1),
    Case("llama", micro_batches=8),
    Case("llama", rows=8, options={"checkpointing": True}),
    Case("gpt2", rows=8, sequence=256, options={"checkpointing": True}),
    Case("gpt_neox", micro_batches=1, options={"checkpointing": True}),
    Case("llama", options={"method": "lora"}),
    Case("gpt2", options={"method": "lora"}),
    Case("qwen2", rows=8, options={"method": "lora", "checkpointing": True}),
    Case("llama", options={"optimizer": "sgd"}),
    Case("llama", options={"optimizer": "adafactor"}),
    Case("gpt2", options={"optimizer": "adafactor", "checkpointing": True}),
    Case("llama", options={"optimizer": "lion"}),
    Case("opt", options={"optimizer": "lamb"}),
    Case("qwen3", options={"optimizer": "lars"}),
    Case("llama", options={"precision": "bf16"}),
    Case("gpt2", options={"precision": "bf16"}),
    Case("gemma2", options={"precision": "bf16", "checkpointing": True}),
    Case("llama", options={"precision": "bf16", "method": "lora"}),
    Case("llama", options={"precision": "pure_bf16"}),
    Case("qwen3", options={"precision": "pure_bf16", "optimizer": "adafactor"}),
    Case("llama", options={"attention": "eager"}),
    Case("llama", options={"packing": True}),
    Case("llama", options={"smoothing": True}),
    Case("gpt2", options={"freeze": "transformer.wte.*"}),
    Case("mixtral", options={"aux_scope": "sequence"}),
    Case("mixtral", options={"checkpointing": True, "aux_scope": "none"}),
    Case("phi3", rows=3, sequence=200, micro_batches=3),
    Case("falcon", rows=2, sequence=300, options={"method": "lora"}),
    Case("bloom", rows=6, sequence=100, options={"optimizer": "sgd", "checkpointing": True}),
    Case("llama", ranks=2),
    Case("llama", ranks=2, micro_batches=1),
    Case("gpt2", ranks=4, micro_batches=1, options={"method": "lora"}),
    Case("qwen3", ranks=2, micro_batches=1, options={"precision": "bf16", "checkpointing": True}),
    Case("llama", ranks=2, strategy="fsdp"),
    Case("llama", ranks=3, strategy="fsdp", options={"checkpointing": True}),
    Case("llama", ranks=4, strategy="fsdp", micro_batches=1),
    Case("gpt2", ranks=2, strategy="fsdp", options={"method": "lora"}),
    Case("qwen2", ranks=3, strategy="fsdp", rows=8, options={"precision": "bf16"}),
    Case("gemma2", ranks=2, strategy="fsdp", options={"precision": "bf16", "checkpointing": True}),
    Case("mixtral", ranks=2, strategy="fsdp", options={"optimizer": "sgd"}),
    Case("llama", ranks=3, strategy="fsdp", stage=1),
    Case("llama", ranks=2, strategy="fsdp", stage=1, micro_batches=1, options={"precision": "bf16"}),
    Case("qwen3", ranks=2, strategy="fsdp", stage=2),
    Case("gpt2", ranks=4, strategy="fsdp", stage=2, options={"checkpointing": True}),
    Case("gpt2", ranks=2, strategy="fsdp", stage=1, options={"method": "lora"}),
    Case("opt", ranks=8, strategy="fsdp", rows=2, sequence=256, options={"optimizer": "lion"}),
]


def predicted_bytes(case: Case, requested: dict[str, Any]) -> int:
    """The peak that a simulation predicts, with the recipe that the service would use."""
    from app.contract.memory_profile import Recipe
    from app.planning.estimate import ByProfile, Estimate, WithGradientBuffers
    from app.planning.planner import recipe_of_rank
    from workers.profiling.profile import make_profile

    recipe = Recipe.model_validate(requested["recipe"])
    if case.ranks > 1:
        recipe = recipe_of_rank(recipe, case.ranks, case.strategy, case.stage)
    estimate: Estimate = ByProfile(
        make_profile(case.config, recipe, case.sequence).curve, recipe, "simulated"
    )
    if case.ranks > 1 and case.strategy == "ddp":
        estimate = WithGradientBuffers(estimate)
    return estimate.memory(case.rows, accumulating=case.micro_batches > 1).peak_allocated_bytes


def true_bytes(case: Case, folder: Path) -> dict[str, Any]:
    """The peak of the trainer itself, in its own process, and the recipe of that run."""
    requested = {"config": case.config, "rows": case.rows, "sequence": case.sequence,
             "micro_batches": case.micro_batches, "options": case.options, "folder": str(folder),
             "ranks": case.ranks, "strategy": case.strategy, "stage": case.stage}  # fmt: skip
    command = [sys.executable, "-m", "tests.benchmarks.true_peak", json.dumps(requested)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if "RESULT " not in done.stdout:
        raise RuntimeError(f"{case} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.split("RESULT ")[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose family or options contain this")
    parser.add_argument(
        "--families", action="store_true", help="compare the other families instead, and write a table"
    )
    parser.add_argument("--draw", type=int, default=0, help="compare this many random combinations instead")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the random draw; a new one by default"
    )
    requested = parser.parse_args()
    cases = CASES
    if requested.draw:
        from tests.benchmarks.draws import draw

        seed = requested.seed if requested.seed is not None else randrange(2**31)
        print(f"seed {seed}")
        cases = draw(requested.draw, seed)
    if requested.families:
        cases = [Case(family, rows=8, sequence=64) for family in OTHER_FAMILIES]
    chosen = [case for case in cases if requested.only in f"{case.family} {case.label}"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(chosen):
            try:
                rows.append(compare(case, Path(folder) / str(number)))
            except Exception as error:
                if not requested.families:
                    raise
                print(f"{case.family:9} not compared: {type(error).__name__}: {str(error)[:300]}", flush=True)
    summary = summarise(rows)
    print(summary)
    if not requested.only and not requested.draw:
        write(rows, summary, "accuracy_families" if requested.families else "accuracy")


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """Compares one case.

    Changes that the trainer makes are part of the comparison: its recipe says whether it pads instead of
    packing, and the simulation detects a model without sdpa attention.
    """
    true = true_bytes(case, folder)
    assert true["own_logits"] == (case.family in OWN_LOGITS), f"{case.family}: update OWN_LOGITS"
    predicted = predicted_bytes(case, true)
    error = predicted / true["bytes"] - 1
    shape = f"{case.rows} × {case.sequence}, K = {case.micro_batches}"
    sizes = f"{true['bytes'] / MIB:8.1f} MiB {predicted / MIB:8.1f} {error:+8.3%}"
    print(f"{case.family:9} {shape:16} {case.label:40} {sizes}", flush=True)
    if case.shape and abs(error) > PRINT_SHAPE_ABOVE:
        print(f"{'':9} {case.shape}", flush=True)
    return {
        "family": case.family,
        "options": case.label,
        "rows": case.rows,
        "sequence": case.sequence,
        "micro_batches": case.micro_batches,
        "true_bytes": true["bytes"],
        "predicted_bytes": predicted,
        "error": error,
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The mean and the 95th percentile of the absolute relative errors, and the extremes of the errors."""
    sizes = [abs(row["error"]) for row in rows]
    return {
        "combinations": len(rows),
        "mean_absolute_error": fmean(sizes),
        "p95_absolute_error": quantiles(sizes, n=20, method="inclusive")[-1] if len(sizes) > 1 else sizes[0],
        "worst_under": min(0.0, *(row["error"] for row in rows)),
        "worst_over": max(0.0, *(row["error"] for row in rows)),
    }


def write(rows: list[dict[str, Any]], summary: dict[str, float], name: str) -> None:
    """Writes the figures, a table and a chart."""
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "pytorch_optimizer")}
    about = {
        "date": datetime.now(UTC).date().isoformat(), "device": f"CPU, {platform.machine()}",
        "python": platform.python_version(), **versions,
        "truth": "peak of live tensor bytes of the trainer's second window on the CPU",
    }  # fmt: skip
    content = {"about": about, "summary": summary, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [
        f"{summary['combinations']} combinations on {about['date']} ({about['device']}, torch "
        f"{versions['torch']}): mean absolute error {summary['mean_absolute_error']:.2%}, 95th percentile "
        f"{summary['p95_absolute_error']:.2%}, from {summary['worst_under']:+.2%} to "
        f"{summary['worst_over']:+.2%}. Truth: {about['truth']}. Repeat with `make accuracy`.",
        "",
        "| family | rows × tokens | K | options | true MiB | predicted MiB | error |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['family']} | {row['rows']} × {row['sequence']} | {row['micro_batches']} | "
            f"{row['options']} | {row['true_bytes'] / MIB:.1f} | {row['predicted_bytes'] / MIB:.1f} | "
            f"{row['error']:+.3%} |"
            for row in rows
        ),
    ]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    if name == "accuracy":
        plot(rows)


def plot(rows: list[dict[str, Any]]) -> None:
    """Plots the predicted peaks over the true ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 6), layout="constrained")
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        axes.scatter([row["true_bytes"] / MIB for row in own], [row["predicted_bytes"] / MIB for row in own],
                     s=24, label=family)  # fmt: skip
    ends = [min(row["true_bytes"] for row in rows) / MIB, max(row["true_bytes"] for row in rows) / MIB]
    axes.plot(ends, ends, color="gray", linewidth=0.8, zorder=0)
    axes.set(xlabel="true peak, MiB", ylabel="predicted peak, MiB", xscale="log", yscale="log",
             title="Peak of live tensor bytes, CPU")  # fmt: skip
    axes.legend(fontsize="small")
    figure.savefig(RESULTS / "accuracy.png", dpi=130)


if __name__ == "__main__":
    main()
