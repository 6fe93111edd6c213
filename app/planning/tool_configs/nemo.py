"""Configurations of NeMo AutoModel."""

from typing import Any

from app.planning.tool_configs.job import (
    OUTPUT,
    NotExpressible,
    ToolConfig,
    ToolJob,
    as_yaml,
    targets_of,
    with_header,
)


def nemo(job: ToolJob) -> ToolConfig:
    """https://docs.nvidia.com/nemo/automodel/latest/guides/llm/finetune.html"""
    if job.objective != "sft":
        raise NotExpressible("configurations of NeMo AutoModel are written for sft only: choose another tool")
    if job.optimizer != "adamw":
        raise NotExpressible(f"configurations of NeMo AutoModel have no {job.optimizer}: choose adamw")
    if job.method.name == "qlora":
        raise NotExpressible("configurations of NeMo AutoModel are written for full and lora: choose lora")
    if job.precision not in ("fp32", "pure_bf16", "bf16"):
        raise NotExpressible("NeMo AutoModel trains in fp32 or bf16: choose one of these precisions")
    found: dict[str, Any] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {
            "global_batch_size": job.split.effective_batch,
            "local_batch_size": job.split.micro_batch,
            "num_epochs": job.epochs,
        },
        "dist_env": {"backend": "nccl", "timeout_minutes": 10},
        "rng": {
            "_target_": "nemo_automodel.components.training.rng.StatefulRNG", "seed": 42, "ranked": True,
        },
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": job.model,
            "torch_dtype": "float32" if job.precision == "fp32" else "bfloat16",
        },
        "distributed": {
            "strategy": "fsdp2",
            "dp_size": job.split.devices,
            "tp_size": 1,
            "cp_size": 1,
            "activation_checkpointing": job.gradient_checkpointing,
        },
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.ColumnMappedTextInstructionDataset",
            "path_or_dataset_id": job.data,
            "column_mapping": {"question": "prompt", "answer": "completion"},
            "seq_length": job.max_length,
            "truncation": True,
        },
        "dataloader": {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
            "shuffle": True,
        },
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "optimizer": {
            "_target_": "torch.optim.AdamW", "lr": job.learning_rate, "betas": [0.9, 0.999], "eps": 1e-8,
            "weight_decay": 0.0,
        },
        "clip_grad_norm": {"max_norm": 1.0},
        "checkpoint": {"enabled": True, "checkpoint_dir": OUTPUT, "model_save_format": "safetensors"},
    }  # fmt: skip
    if (lora := job.method.lora) is not None:
        targets = targets_of(lora)
        found["peft"] = {
            "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
            **(
                {"target_modules": [f"*.{each}" for each in targets]}
                if targets
                else {"match_all_linear": True}
            ),
            "dim": lora.r,
            "alpha": lora.alpha,
            "dropout": lora.dropout,
        }
    launch = f"automodel nemo.yaml --nproc-per-node {job.split.devices}"
    return ToolConfig(with_header("NeMo AutoModel", job, launch, as_yaml(found)), launch, "nemo.yaml")
