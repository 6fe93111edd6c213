"""Configurations of other training tools: the same model, method and effective batch, in
micro-batches that divide the batch evenly: the largest that are not above the plan's.

The tools cannot cut a batch into micro-batches of different sizes, so theirs may be smaller than Accrue's. To
add a tool, add a module with a function that writes its configuration, and a line in `_TOOLS`.
"""

from collections.abc import Callable
from typing import Literal

from app.planning.tool_configs.axolotl import axolotl
from app.planning.tool_configs.hugging_face import llamafactory, trl
from app.planning.tool_configs.job import ToolConfig, ToolJob
from app.planning.tool_configs.kubeflow import kubeflow
from app.planning.tool_configs.nemo import nemo
from app.planning.tool_configs.torchtune import torchtune

Tool = Literal["trl", "axolotl", "llamafactory", "torchtune", "nemo", "kubeflow"]

_TOOLS: dict[Tool, Callable[[ToolJob], ToolConfig]] = {
    "trl": trl,
    "axolotl": axolotl,
    "llamafactory": llamafactory,
    "torchtune": torchtune,
    "nemo": nemo,
    "kubeflow": kubeflow,
}


def config_for(tool: Tool, job: ToolJob) -> ToolConfig:
    """The configuration of a tool.

    Raises:
        NotExpressible: the tool cannot train such a job.
    """
    return _TOOLS[tool](job)
