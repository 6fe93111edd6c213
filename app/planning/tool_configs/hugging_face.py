"""Configurations of tools that are based on transformers' Trainer: TRL, and LLaMA-Factory."""

import re
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


def trl(job: ToolJob) -> ToolConfig:
    """https://huggingface.co/docs/trl/clis"""
    command = trl_command(job)
    content = as_yaml(trl_arguments(job) | {"datasets": [{"path": "json", "data_files": job.data}]})
    launch = f"trl {command} --config trl.yaml"
    if job.split.devices > 1:
        launch += f" --num_processes {job.split.devices}"
    return ToolConfig(with_header("TRL", job, launch, content), launch, "trl.yaml")


def trl_command(job: ToolJob) -> str:
    commands: dict[ObjectiveName, str] = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward"}
    if job.objective not in commands:
        raise NotExpressible(
            f"TRL's command line has no {job.objective}: choose sft, dpo, kto or reward, or another tool"
        )
    return commands[job.objective]


def trl_arguments(job: ToolJob) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_name_or_path": job.model,
        "output_dir": OUTPUT,
        "max_length": job.max_length,
        **_hugging_face(job),
    }
    found |= {name: value for name, value in OBJECTIVE_ARGUMENTS[job.objective].items() if value}
    if job.method.lora is not None:
        found |= {"use_peft": True, "lora_task_type": "SEQ_CLS" if job.objective == "reward" else "CAUSAL_LM"}
        found |= {
            "lora_r": job.method.lora.r,
            "lora_alpha": job.method.lora.alpha,
            "lora_dropout": job.method.lora.dropout,
            "lora_target_modules": targets_of(job.method.lora) or "all-linear",
        }
    if job.method.name == "qlora":
        found |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    if job.precision == "pure_bf16":
        found["dtype"] = "bfloat16"
    return found


def _hugging_face(job: ToolJob) -> dict[str, Any]:
    """The arguments of transformers' Trainer, from which TRL and LLaMA-Factory are derived."""
    optimizers: dict[OptimizerName, str] = {
        "adamw": "adamw_torch", "adamw_8bit": "adamw_8bit", "lion": "lion_32bit", "sgd": "sgd",
        "adafactor": "adafactor",
    }  # fmt: skip
    if job.optimizer not in optimizers:
        raise NotExpressible(f"transformers' Trainer has no optimizer {job.optimizer}: choose adamw")
    return {
        "per_device_train_batch_size": job.split.micro_batch,
        "gradient_accumulation_steps": job.split.steps,
        "learning_rate": job.learning_rate,
        "num_train_epochs": job.epochs,
        "lr_scheduler_type": "linear",
        "optim": optimizers[job.optimizer],
        "max_grad_norm": 1.0,
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        **({"tf32": True} if job.precision == "tf32" else {}),
        "gradient_checkpointing": job.gradient_checkpointing,
        "seed": 42,
    }


def llamafactory(job: ToolJob) -> ToolConfig:
    """https://llamafactory.readthedocs.io/en/latest/getting_started/sft.html"""
    stages: dict[ObjectiveName, dict[str, Any]] = {
        "sft": {"stage": "sft"},
        "dpo": {"stage": "dpo", "pref_loss": "sigmoid", "pref_beta": 0.1},
        "orpo": {"stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.1},
        "simpo": {"stage": "dpo", "pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 1.0},
        "kto": {"stage": "kto", "pref_beta": 0.1},
        "reward": {"stage": "rm"},
    }
    if job.objective not in stages:
        raise NotExpressible(f"LLaMA-Factory has no {job.objective}: choose another tool")
    found: dict[str, Any] = {
        **stages[job.objective],
        "do_train": True,
        "model_name_or_path": job.model,
        "dataset": re.sub(r"\.\w+$", "", job.data.rpartition("/")[2]),
        "dataset_dir": ".",
        "template": "default",
        "output_dir": OUTPUT,
        "cutoff_len": job.max_length,
        "finetuning_type": "full" if job.method.lora is None else "lora",
        **_hugging_face(job),
    }
    del found["gradient_checkpointing"]  # which it calls by another name
    found["disable_gradient_checkpointing"] = not job.gradient_checkpointing
    if (lora := job.method.lora) is not None:
        targets = targets_of(lora)
        found |= {
            "lora_rank": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
            "lora_target": ",".join(targets) if targets else "all",
        }  # fmt: skip
    if job.method.name == "qlora":
        found |= {"quantization_bit": 4, "quantization_method": "bnb"}
    if job.precision == "pure_bf16":
        found["pure_bf16"] = True
    launch = "llamafactory-cli train llamafactory.yaml"
    if job.split.devices > 1:
        launch = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={job.split.devices} {launch}"
    note = (
        "dataset is an entry of dataset_info.json, which names the file and its columns; template is the chat"
    )
    note += " template's name (llama3, qwen, …)"
    text = with_header("LLaMA-Factory", job, launch, as_yaml(found), note)
    return ToolConfig(text, launch, "llamafactory.yaml")
