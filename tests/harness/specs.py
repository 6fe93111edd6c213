"""Makes specs and plans for tests."""

from typing import Any

from app.contract.arguments import OPTIMIZER_ARGUMENTS
from app.contract.model_reference import ModelReference
from app.contract.plan import MicroBatchRule, Plan
from app.contract.spec import (
    DataSpec,
    MemoryLimits,
    MethodSpec,
    OptimizerName,
    OptimizerSpec,
    RampSpec,
    RequestedSplit,
    ScheduleName,
    ScheduleSpec,
    Spec,
)
from app.planning.architectures import from_config
from app.planning.catalogue import TINY_GPT2
from app.planning.devices import GIB, Device
from app.planning.plan import make_plan
from app.planning.planner import by_formula


def make_spec(**changes: Any) -> Spec:
    """A small job's spec; keyword arguments replace fields."""
    fields: dict[str, Any] = {
        "model": ModelReference(
            name="accrue/tiny-gpt2", source="built_in", architecture=from_config(TINY_GPT2)
        ),
        "data": DataSpec(
            file_id="file-1",
            sha256="0",
            format="text",
            examples=100,
            max_length=64,
            overlength="truncate",
            packing=False,
            validation=None,
        ),
        "seed": 1,
        "effective_batch_size": 16,
        "epochs": None,
        "max_steps": 10,
        "optimizer": make_optimizer("adamw"),
        "method": MethodSpec(name="full", lora=None),
        "ramp": RampSpec(
            name="constant", warmup_steps=0, loss_variance_threshold=0.01, max_effective_batch_size=128
        ),
        "schedule": make_schedule("linear", warmup_steps=2),
        "label_smoothing": 0.0,
        "aux_scope": "window",
        "loss_spike_zscore": None,
        "accumulate_in_fp32": True,
        "accumulate_gradients_on_cpu": False,
        "compile": False,
        "eval_every": None,
        "early_stopping": None,
        "certificate": False,
        "noise_scale_every": 10,
        "log_micro_losses": False,
        "log_gradients": False,
        "report_to": (),
        "profile": False,
        "gradient_clipping": 1.0,
        "clip_mode": "after_accumulation",
        "precision": "no",
        "gradient_checkpointing": False,
        "attention": "sdpa",
        "freeze": (),
        "save_every": 5,
        "timeout_seconds": None,
        "split": RequestedSplit(accumulation_steps=None, micro_batch_size=None, devices=1),
        "memory": MemoryLimits(max_memory_usage=0.9, memory_safety_margin=0.1),
        "auto_adjust_batch_size": True,
        "log_memory_usage": True,
    }
    return Spec(**{**fields, **changes})


def make_optimizer(name: OptimizerName, rate: float = 1e-3) -> OptimizerSpec:
    """An optimizer with its default arguments."""
    own = dict.fromkeys(("betas", "eps", "momentum", "nesterov", "trust_coefficient"))
    return OptimizerSpec(
        name=name, learning_rate=rate, weight_decay=0.0, **{**own, **OPTIMIZER_ARGUMENTS[name]}
    )


def make_schedule(name: ScheduleName, **changes: Any) -> ScheduleSpec:
    """A schedule with its default arguments and a linear warmup, if any."""
    fields = {"warmup_steps": None, "warmup_ratio": 0.0, "warmup_shape": "linear", "warmup_start": 0.0,
              "final": 0.0, "pct_start": 0.3, "div_factor": 25.0, "final_div_factor": 1e4}  # fmt: skip
    return ScheduleSpec.model_validate({"name": name, **fields, **changes})


def plan_by_formula(spec: Spec, devices: list[Device], **options: Any) -> Plan:
    """A plan made without a profile."""
    return make_plan(spec, devices, by_formula(spec.model.architecture), **options)


def cpu_plan(
    spec: Spec, rule: MicroBatchRule | None = None, memory_limit_bytes: int | None = None, **changes: Any
) -> Plan:
    """The plan of a worker with one thread and 8 GiB.

    Args:
        rule, memory_limit_bytes: replace those of the plan's only rank, unless None.
        changes: other fields of the plan.
    """
    plan = plan_by_formula(spec, [Device("cpu", "CPU", 8 * GIB, "cpu")], predicted=False, threads=1)
    given = {"micro_batch_rule": rule, "memory_limit_bytes": memory_limit_bytes}
    rank = plan.ranks[0].model_copy(update={name: own for name, own in given.items() if own is not None})
    return plan.model_copy(update={"ranks": (rank,), **changes})
