"""Predicted memory compared with what the allocator of a real GPU counts."""

from pathlib import Path
from typing import Any

import pytest

from app.contract.memory_profile import Recipe
from app.planning.estimate import ByProfile
from tests.gpu.checks import Place
from tests.gpu.kernels import GPT2, LLAMA, LORA, peaks, uses_expandable_segments
from tests.harness.gpu_results import keep
from workers.profiling.profile import make_profile

MIB = 2**20


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
    config: dict[str, Any], options: dict[str, Any], rows: int, sequence: int, steps: int, tmp_path: Path
) -> None:
    recipe = Recipe(device="cuda", expandable_segments=uses_expandable_segments(), **options)
    place = Place("cuda", tmp_path)
    place.clear()
    true = peaks(place, config, recipe, rows, sequence, steps)
    place.clear()
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
