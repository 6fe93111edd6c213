"""Jobs for Kubeflow Trainer."""

import re

from app.planning.tool_configs.hugging_face import trl_arguments, trl_command
from app.planning.tool_configs.job import ToolConfig, ToolJob, as_word, as_yaml, with_header

_DATA_FOLDER = "/data"
_IMAGE = "pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime"


def kubeflow(job: ToolJob) -> ToolConfig:
    """A TrainJob of Kubeflow Trainer 2 that runs TRL: https://www.kubeflow.org/docs/components/trainer/"""
    arguments = [
        word
        for name, value in {**trl_arguments(job), "dataset_name": _DATA_FOLDER}.items()
        for word in (f"--{name}", *(map(as_word, value) if isinstance(value, list) else [as_word(value)]))
    ]
    found = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _kubernetes_name(job.model)},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": _IMAGE,
                "numNodes": 1,
                "numProcPerNode": job.split.devices,
                "command": ["torchrun", "-m", f"trl.scripts.{trl_command(job)}"],
                "args": arguments,
                "resourcesPerNode": {"limits": {"nvidia.com/gpu": job.split.devices}},
            },
        },
    }
    launch = "kubectl apply -f kubeflow.yaml"
    note = f"the image needs TRL, and the training data in {_DATA_FOLDER}: build one, or mount a volume"
    return ToolConfig(
        with_header("Kubeflow Trainer", job, launch, as_yaml(found), note), launch, "kubeflow.yaml"
    )


def _kubernetes_name(model: str) -> str:
    """A name that Kubernetes accepts: lower case, at most 55 characters."""
    plain = re.sub(r"[^a-z0-9-]+", "-", model.rpartition("/")[2].lower()).strip("-")[:50].strip("-")
    return f"tune-{plain or 'model'}"
