"""Jobs for other tools, and what their configurations consist of."""

import shlex
from typing import Any

from app.contract.objective import ObjectiveName
from app.planning.defaults import method_spec
from app.planning.tool_configs.job import ToolJob, split_evenly

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SPLIT = split_evenly(60, 2, 7)
"""6 samples × 5 steps × 2 devices."""


def job(objective: ObjectiveName = "sft", method: Any = "lora", **changes: Any) -> ToolJob:
    own = {
        "model": LLAMA, "objective": objective, "method": method_spec(method), "split": SPLIT,
        "precision": "bf16", "optimizer": "adamw", "gradient_checkpointing": True, "max_length": 2048,
        "learning_rate": 5e-5, "epochs": 3,
    }  # fmt: skip
    return ToolJob(**{**own, **changes})


def words_of(command: str) -> list[str]:
    """The words of a command, as a shell takes them."""
    return shlex.split(command.replace("\\\n", " "), comments=True)
