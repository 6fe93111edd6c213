"""Configurations of torchtune."""

import re
import shlex
from typing import Any

from app.planning.tool_configs.job import NotExpressible, ToolConfig, ToolJob, as_word, with_header

_FAMILIES = {
    "Llama-2": "llama2", "Llama-3": "llama3", "Llama-3.1": "llama3_1", "Llama-3.2": "llama3_2",
    "Llama-3.3": "llama3_3", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen2.5": "qwen2_5",
    "gemma": "gemma", "gemma-2": "gemma2",
}  # fmt: skip
"""Beginnings of models' names, and the folders of torchtune's configurations."""

_CONFIGURATIONS = {
    "llama2": "7B_full 7B_lora 7B_lora_single_device 7B_qlora 7B_qlora_single_device 13B_full 13B_lora "
    "13B_qlora_single_device 70B_lora 70B_qlora",
    "llama3": "8B_full 8B_full_single_device 8B_lora 8B_lora_single_device 8B_qlora_single_device 70B_full "
    "70B_lora",
    "llama3_1": "8B_full 8B_full_single_device 8B_lora 8B_lora_single_device 8B_qlora_single_device 70B_full "
    "70B_lora 405B_qlora",
    "llama3_2": "1B_full 1B_full_single_device 1B_lora 1B_lora_single_device 1B_qlora_single_device 3B_full "
    "3B_full_single_device 3B_lora 3B_lora_single_device 3B_qlora_single_device",
    "llama3_3": "70B_full 70B_lora 70B_qlora",
    "mistral": "7B_full 7B_lora 7B_lora_single_device 7B_qlora_single_device",
    "qwen2": "0.5B_full 0.5B_full_single_device 0.5B_lora 0.5B_lora_single_device 1.5B_full "
    "1.5B_full_single_device 1.5B_lora 1.5B_lora_single_device 7B_full 7B_full_single_device 7B_lora "
    "7B_lora_single_device",
    "qwen2_5": "0.5B_full 0.5B_full_single_device 0.5B_lora 0.5B_lora_single_device 1.5B_full "
    "1.5B_full_single_device 1.5B_lora 1.5B_lora_single_device 3B_full 3B_full_single_device 3B_lora "
    "3B_lora_single_device 7B_full 7B_full_single_device 7B_lora 7B_lora_single_device "
    "14B_lora_single_device 32B_lora 72B_lora",
    "gemma": "2B_full 2B_lora 2B_lora_single_device 2B_qlora_single_device 7B_full 7B_lora "
    "7B_lora_single_device 7B_qlora_single_device",
    "gemma2": "2B_full 2B_lora 2B_lora_single_device 2B_qlora_single_device 9B_full 9B_lora "
    "9B_lora_single_device 9B_qlora_single_device 27B_full 27B_lora 27B_lora_single_device "
    "27B_qlora_single_device",
}
"""The configurations for full fine-tuning and adapters that come with torchtune 0.6.1."""


def torchtune(job: ToolJob) -> ToolConfig:
    """Changes to a configuration that comes with torchtune, since its files name each model's parts:
    https://meta-pytorch.org/torchtune/stable/tune_cli.html"""
    if job.objective != "sft":
        raise NotExpressible("commands for torchtune are written for sft only: choose another tool")
    if job.precision not in ("fp32", "pure_bf16", "bf16"):
        raise NotExpressible("torchtune trains in fp32 or in pure_bf16: choose one of these precisions")
    if job.optimizer not in ("adamw", "adamw_8bit"):
        raise NotExpressible(
            f"torchtune's configurations have no {job.optimizer}: choose adamw or adamw_8bit"
        )
    single = job.split.devices == 1
    configuration = _configuration(job.model, f"{job.method.name}{'_single_device' if single else ''}")
    recipe = "full_finetune" if job.method.lora is None else "lora_finetune"
    changes: dict[str, Any] = {
        "batch_size": job.split.micro_batch,
        "gradient_accumulation_steps": job.split.steps,
        "epochs": job.epochs,
        "optimizer.lr": job.learning_rate,
        "tokenizer.max_seq_len": job.max_length,
        "dtype": "fp32" if job.precision == "fp32" else "bf16",
        "enable_activation_checkpointing": job.gradient_checkpointing,
        "clip_grad_norm": 1.0,
        "dataset.packed": False,
        "dataset.source": "json",
        "dataset.data_files": job.data,
        "seed": 42,
        "optimizer._component_": "torch.optim.AdamW"
        if job.optimizer == "adamw"
        else "bitsandbytes.optim.PagedAdamW8bit",
    }
    if job.method.lora is not None:
        changes |= {
            "model.lora_rank": job.method.lora.r,
            "model.lora_alpha": job.method.lora.alpha,
            "model.lora_dropout": job.method.lora.dropout,
        }
    launch = "tune run " + ("" if single else f"--nproc_per_node {job.split.devices} ")
    launch += f"{recipe}_{'single_device' if single else 'distributed'} --config {configuration}"
    words = [shlex.quote(f"{name}={as_word(value)}") for name, value in changes.items()]
    command = " \\\n    ".join([launch, *words])
    return ToolConfig(with_header("torchtune", job, None, f"{command}\n"), command, "torchtune.sh")


def _configuration(model: str, kind: str) -> str:
    """The name of the configuration for a model, such as llama3_2/1B_full.

    Raises:
        NotExpressible: torchtune has none.
    """
    plain = model.rpartition("/")[2].partition("@")[0]
    for beginning, folder in sorted(_FAMILIES.items(), reverse=True):  # longer names of a family first
        if re.match(rf"(Meta-)?{re.escape(beginning)}(?=-|$)", plain, re.IGNORECASE) is None:
            continue
        for name in _CONFIGURATIONS[folder].split():
            size, _, own = name.partition("_")
            if own == kind and re.search(rf"(?<![.0-9]){re.escape(size)}(?![0-9])", plain, re.IGNORECASE):
                return f"{folder}/{name}"
    method, *single = kind.split("_", 1)
    where = "on a single device" if single else "on several devices"
    raise NotExpressible(
        f"torchtune has no configuration for {model} with {method} {where}: choose another tool"
    )
