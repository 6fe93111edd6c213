"""Configurations of Axolotl."""

from typing import Any

from app.contract.objective import OBJECTIVE_ARGUMENTS, ObjectiveName
from app.contract.spec import OptimizerName
from app.planning.tool_configs.job import (
    OUTPUT,
    NotExpressible,
    ToolConfig,
    ToolJob,
    as_yaml,
    targets_of,
    with_header,
)


def axolotl(job: ToolJob) -> ToolConfig:
    """https://docs.axolotl.ai/docs/config-reference.html"""
    optimizers: dict[OptimizerName, str] = {
        "adamw": "adamw_torch", "adamw_8bit": "adamw_8bit", "lion": "lion_32bit", "sgd": "sgd",
        "adafactor": "adafactor",
    }  # fmt: skip
    if job.objective == "classification":
        raise NotExpressible("Axolotl has no classification: choose another tool")
    if job.optimizer not in optimizers:
        raise NotExpressible(f"Axolotl has no optimizer {job.optimizer}: choose adamw")
    kind: dict[ObjectiveName, dict[str, Any]] = {
        "sft": {"type": "chat_template"},
        "dpo": {"type": "chat_template.default"},
        "orpo": {"type": "chat_template.argilla"},
        "simpo": {"type": "chat_template.default"},
        "kto": {"type": "llama3.argilla"},
        "reward": {"type": "bradley_terry.chat_template"},
    }
    found: dict[str, Any] = {
        "base_model": job.model,
        "datasets": [{"path": job.data, "ds_type": "json", "split": "train", **kind[job.objective]}],
        "output_dir": OUTPUT,
        "sequence_len": job.max_length,
        "sample_packing": False,
        "micro_batch_size": job.split.micro_batch,
        "gradient_accumulation_steps": job.split.steps,
        "num_epochs": job.epochs,
        "learning_rate": job.learning_rate,
        "lr_scheduler": "linear",
        "optimizer": optimizers[job.optimizer],
        "max_grad_norm": 1.0,
        "bf16": job.precision in ("bf16", "pure_bf16"),
        "fp16": job.precision == "fp16",
        "tf32": job.precision == "tf32",
        "gradient_checkpointing": job.gradient_checkpointing,
        "seed": 42,
    }
    if job.objective == "reward":
        found |= {"reward_model": True, "num_labels": 1, "model_type": "AutoModelForSequenceClassification"}
        if (centered := OBJECTIVE_ARGUMENTS["reward"]["center_rewards_coefficient"]) > 0:
            found["center_rewards_coefficient"] = centered
    elif job.objective != "sft":
        arguments = OBJECTIVE_ARGUMENTS[job.objective]
        found["rl"] = job.objective
        found |= {
            "dpo": {"rl_beta": arguments.get("beta")},
            "orpo": {"orpo_alpha": arguments.get("beta")},
            "simpo": {"rl_beta": arguments.get("beta"), "simpo_gamma": arguments.get("gamma")},
            "kto": {"rl_beta": arguments.get("beta"), "remove_unused_columns": False},
        }[job.objective]
    if (lora := job.method.lora) is not None:
        found |= {
            "adapter": job.method.name, "lora_r": lora.r, "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
        }  # fmt: skip
        found |= (
            {"lora_target_linear": True}
            if lora.target_modules is None
            else {"lora_target_modules": targets_of(lora)}
        )
    if job.method.name == "qlora":
        found["load_in_4bit"] = True
    launch = "axolotl train axolotl.yaml"
    if job.split.devices > 1:
        launch += f" --launcher torchrun -- --nproc-per-node {job.split.devices}"
    return ToolConfig(with_header("Axolotl", job, launch, as_yaml(found)), launch, "axolotl.yaml")
