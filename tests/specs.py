"""Specs and plans by hand."""

from typing import Any

from app.planning.architectures import TINY_GPT2, from_config
from app.planning.devices import GIB, Device
from app.planning.plan import make_plan
from app.schemas.architecture import ModelReference
from app.schemas.spec import (
    AskedSplit,
    DataSpec,
    MemoryLimits,
    OptimizerSpec,
    Plan,
    ScheduleSpec,
    Spec,
)


def make_spec(**changes: Any) -> Spec:
    """A small job's spec; keyword arguments replace fields."""
    fields: dict[str, Any] = {
        "model": ModelReference(
            name="accrue/tiny-gpt2", source="built_in", architecture=from_config(TINY_GPT2)
        ),
        "data": DataSpec(
            file_id="file-1", sha256="0", format="text", examples=100, max_length=64, overlength="truncate"
        ),
        "seed": 1,
        "effective_batch_size": 16,
        "epochs": None,
        "max_steps": 10,
        "optimizer": OptimizerSpec(
            name="adamw", learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, momentum=0.0
        ),
        "schedule": ScheduleSpec(name="linear", warmup_steps=2, warmup_ratio=0.0),
        "gradient_clipping": 1.0,
        "clip_mode": "after_accumulation",
        "precision": "no",
        "gradient_checkpointing": False,
        "attention": "sdpa",
        "freeze": (),
        "save_every": 5,
        "timeout_seconds": None,
        "split": AskedSplit(accumulation_steps=None, micro_batch_size=None, devices=1),
        "memory": MemoryLimits(max_memory_usage=0.9, memory_safety_margin=0.1),
        "auto_adjust_batch_size": True,
        "log_memory_usage": True,
    }
    return Spec(**{**fields, **changes})


def cpu_plan(spec: Spec, **changes: Any) -> Plan:
    """The plan of a worker with one thread and 8 GiB."""
    plan = make_plan(spec, [Device("cpu", "CPU", 8 * GIB, "cpu")], predicted=False, threads=1)
    return plan.model_copy(update=changes)
