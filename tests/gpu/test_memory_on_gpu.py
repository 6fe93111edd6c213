"""Predicted memory compared with what the allocator of a real GPU counts."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.contract.memory_profile import Recipe
from app.contract.model_reference import LoraSpec
from app.planning.estimate import ByProfile
from tests.harness.gpu_results import keep
from workers.profiling.profile import make_profile
from workers.training import model as models
from workers.training.batches import MicroBatch
from workers.training.gradients import gradients_for
from workers.training.loss import TokenLoss
from workers.training.window import Clipping, Window

CUDA = torch.device("cuda")
MIB = 2**20
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


def measured(config: dict[str, Any], recipe: Recipe, rows: int, sequence: int, steps: int) -> dict[str, int]:
    """Bytes at the peak of the second window of a real model on the GPU."""
    fields = dict(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    dtype = torch.bfloat16 if recipe.precision == "pure_bf16" else torch.float32
    model = models.prepare_for_training(
        AutoModelForCausalLM.from_config(made, dtype=dtype).cuda(),
        lora=recipe.lora, seed=0, gradient_checkpointing=recipe.gradient_checkpointing, freeze=(),
        precision=recipe.precision,
    )  # fmt: skip
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-4, fused=True)
    gradients = gradients_for(parameters, in_fp32=True, host=None)
    window, loss = Window(parameters, optimizer, Clipping(1.0), gradients=gradients), TokenLoss(model)
    ids = torch.randint(0, made.vocab_size, (rows, sequence))
    predicted = torch.cat([r * sequence + torch.arange(sequence - 1) for r in range(rows)])
    batch = MicroBatch(ids, predicted, ids.flatten()[predicted + 1], (sequence,) * rows).to(CUDA)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        window.open(float(len(batch.targets) * steps))
        for _ in range(steps):
            with models.autocast(recipe.precision, "cuda"):
                summed = loss(batch).loss_sum
            window.add(summed)
        assert window.close().applied
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "process": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0],
    }


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("config", "options", "rows", "sequence"),
    [
        (LLAMA, {"precision": "bf16"}, 4, 1024),
        (LLAMA, {"precision": "bf16"}, 16, 512),
        (LLAMA, {"precision": "bf16", "gradient_checkpointing": True}, 16, 1024),
        (LLAMA, {"precision": "bf16", "lora": LORA}, 8, 1024),
        (LLAMA, {"precision": "pure_bf16"}, 8, 1024),
        (LLAMA, {"precision": "fp32"}, 4, 1024),
        (GPT2, {"precision": "bf16"}, 8, 1024),
        (GPT2, {"precision": "bf16", "gradient_checkpointing": True}, 16, 1024),
    ],
)  # fmt: skip
def test_the_peak_is_as_predicted(
    config: dict[str, Any], options: dict[str, Any], rows: int, sequence: int, steps: int
) -> None:
    recipe = Recipe(device="cuda", **options)
    torch.cuda.empty_cache()
    true = measured(config, recipe, rows, sequence, steps)
    torch.cuda.empty_cache()
    estimate = ByProfile(make_profile(config, recipe, sequence).curve, recipe, "simulated")
    memory = estimate.memory(rows, accumulating=steps > 1)
    error = memory.peak_allocated_bytes / true["allocated"] - 1
    told = {name: size / MIB for name, size in true.items()}
    keep(
        f"memory {config['model_type']} {options} {rows}x{sequence} K={steps}",
        {**told, "predicted_allocated": memory.peak_allocated_bytes / MIB,
         "predicted_reserved": memory.peak_reserved_bytes / MIB,
         "predicted_process": memory.peak_process_bytes / MIB, "error": error},
    )  # fmt: skip
    assert abs(error) <= 0.02
