"""What a TrainJob of Kubeflow Trainer should ask for: its GPUs, and the micro-batch and accumulation steps.

A recommender as in Kubeflow's KEP-3328 (https://github.com/kubeflow/trainer/pull/3559): a controller in the
cluster sends a new TrainJob, and applies the patch that it gets. The KEP leaves open how the two communicate,
so this is plain HTTP: a TrainJob in, a JSON merge patch (RFC 7386) out. It reads TrainJobs that run TRL, as
those of `accrue plan --emit kubeflow` do.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, StringConstraints, ValidationError

from app.contract.base import Request, RequestPart, ResponseModel
from app.contract.objective import ObjectiveName
from app.contract.spec import OptimizerName
from app.errors import Unprocessable
from app.planning.schemas import BatchSizeRequest
from app.planning.tool_configs.job import NotExpressible, ToolSplit, split_evenly

GPU = "nvidia.com/gpu"
_MICRO_BATCH, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_ARGUMENTS = "spec.trainer.args"

Word = Annotated[str, StringConstraints(max_length=4096)]
Words = Annotated[list[Word], Field(max_length=1000)]
Count = Annotated[int, Field(ge=1, le=1024)]

_OPTIMIZERS: dict[str, OptimizerName] = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit", "lion_32bit": "lion", "sgd": "sgd", "adafactor": "adafactor",
}  # fmt: skip
"""Our names of the optimizers of transformers' Trainer."""

_MAX_GPUS = 1024

_KUBERNETES = ConfigDict(extra="ignore")
"""Objects of Kubernetes have many more fields than are read here."""


class _Resources(RequestPart):
    model_config = _KUBERNETES

    limits: dict[str, int | Word] = Field({}, max_length=100)
    requests: dict[str, int | Word] = Field({}, max_length=100)


class _Trainer(RequestPart):
    model_config = _KUBERNETES

    command: Words = Field([])
    args: Words = Field([])
    nodes: Count = Field(1, validation_alias="numNodes")
    processes: Count | Literal["auto", "cpu", "gpu"] | None = Field(None, validation_alias="numProcPerNode")
    resources: _Resources = Field(_Resources(), validation_alias="resourcesPerNode")


class _Spec(RequestPart):
    model_config = _KUBERNETES

    trainer: _Trainer


class TrainJob(Request):
    """A TrainJob (trainer.kubeflow.org), as `kubectl get --output json` prints it."""

    model_config = _KUBERNETES

    kind: Literal["TrainJob"]
    spec: _Spec


class TrainJobRecommendation(ResponseModel):
    patch: dict[str, Any] = Field(description="A JSON merge patch for the TrainJob (RFC 7386)")
    gpu: str = Field(description="The first of the kinds that were given on which the job fits")
    gpus_per_node: int
    nodes: int
    effective_batch_size: int = Field(description="micro_batch_size × accumulation_steps × GPUs; unchanged")
    micro_batch_size: int
    accumulation_steps: int
    explanation: str
    warnings: list[str]


@dataclass(frozen=True)
class TrlJob:
    """What a TrainJob trains. Arguments that it does not give have TRL's defaults.

    Raises:
        Unprocessable: it does not run TRL, or its arguments have values that the planner does not know.
    """

    job: TrainJob

    @property
    def _trainer(self) -> _Trainer:
        return self.job.spec.trainer

    @property
    def nodes(self) -> int:
        return self._trainer.nodes

    @property
    def gpus_per_node(self) -> int:
        """The number of processes per node; if that is not a number, the number of GPUs asked for, or 1."""
        processes, resources = self._trainer.processes, self._trainer.resources
        if isinstance(processes, int):
            return processes
        asked = resources.limits.get(GPU, resources.requests.get(GPU, 1))
        if not re.fullmatch(r"[1-9]\d{0,3}", str(asked)):
            raise Unprocessable(
                f"{GPU} is {asked!r}: give a number of GPUs.", field="spec.trainer.resourcesPerNode"
            )
        return int(asked)

    @property
    def devices(self) -> int:
        count = self.nodes * self.gpus_per_node
        if count > _MAX_GPUS:
            raise Unprocessable(
                f"{count} GPUs: at most {_MAX_GPUS} can be planned.", field="spec.trainer.numNodes"
            )
        return count

    @property
    def effective_batch(self) -> int:
        return self._count(_MICRO_BATCH, 8) * self._count(_STEPS, 1) * self.devices

    def request(self, gpu: str) -> BatchSizeRequest:
        """What the calculator is asked, for GPUs of a kind."""
        arguments = self._arguments
        if not arguments.get("model_name_or_path"):
            raise Unprocessable(
                f"{_ARGUMENTS} has no --model_name_or_path: resources are recommended for TrainJobs whose "
                "arguments are those of TRL.",
                field=_ARGUMENTS,
            )
        optimizer = self._word("optim", "adamw_torch")
        if optimizer not in _OPTIMIZERS:
            raise Unprocessable(
                f"The planner does not know the optimizer {optimizer!r}: choose one of "
                f"{', '.join(_OPTIMIZERS)}.",
                field=_ARGUMENTS,
            )
        given = {
            "model_name": self._word("model_name_or_path", ""),
            "target_effective_batch_size": self.effective_batch,
            "gpus": [gpu] * self.devices,
            "max_length": self._count("max_length", 1024),
            "objective": self._objective,
            "method": self._method,
            "optimizer": _OPTIMIZERS[optimizer],
            "mixed_precision": self._precision,
            "gradient_checkpointing": self._flag("gradient_checkpointing", default=True),
        }
        try:
            return BatchSizeRequest.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise Unprocessable(
                f"{'.'.join(map(str, first['loc'])) or 'train_job'}: {first['msg']}.", field=_ARGUMENTS
            ) from None

    def split(self, most: int) -> ToolSplit:
        """The largest equal micro-batches of at most `most` samples that train its batch.

        Raises:
            Unprocessable: its GPUs cannot share the batch.
        """
        try:
            return split_evenly(self.effective_batch, self.devices, most)
        except NotExpressible as error:
            raise Unprocessable(f"{error}.", field=_ARGUMENTS) from None

    def patch(self, split: ToolSplit) -> dict[str, Any]:
        """What makes it train the split, as a JSON merge patch, in which lists are given in full."""
        gpus = {GPU: self.gpus_per_node}
        requested = self._trainer.resources.requests
        both = {"limits": gpus} | ({"requests": gpus} if GPU in requested else {})  # which must be the same
        patched: dict[str, Any] = {"resourcesPerNode": both}
        missing: list[str] = []
        lists = {"args": self._trainer.args, "command": self._trainer.command}  # later words count
        for name, value in ((_MICRO_BATCH, split.micro_batch), (_STEPS, split.steps)):
            holder = next((each for each, words in lists.items() if name in _read(words)), None)
            if holder is None:
                missing += [f"--{name}", str(value)]
            else:
                lists[holder] = patched[holder] = _with_argument(lists[holder], name, value)
        if missing:
            patched["args"] = [*lists["args"], *missing]
        return {"spec": {"trainer": patched}}

    @cached_property
    def _arguments(self) -> dict[str, list[str]]:
        return _read([*self._trainer.command, *self._trainer.args])

    def _word(self, name: str, default: str) -> str:
        return (self._arguments.get(name) or [default])[0]

    def _count(self, name: str, default: int) -> int:
        value = self._word(name, str(default))
        if not re.fullmatch(r"[1-9]\d{0,6}", value):
            raise Unprocessable(f"--{name} is {value!r}: give a whole number from 1.", field=_ARGUMENTS)
        return int(value)

    def _flag(self, name: str, *, default: bool) -> bool:
        if f"no_{name}" in self._arguments:
            return False
        if name not in self._arguments:
            return default
        return self._word(name, "true").lower() in ("true", "1", "yes")

    @property
    def _objective(self) -> ObjectiveName:
        """That of TRL's script, such as `trl.scripts.dpo` or `trl dpo`."""
        words = " ".join([*self._trainer.command, *self._trainer.args])
        found = re.search(r"\b(?:trl\.scripts\.|trl |scripts/)(\w+)", words)
        named = found[1] if found else "sft"
        if named not in get_args(ObjectiveName):
            raise Unprocessable(f"The planner does not know TRL's {named!r}.", field="spec.trainer.command")
        return named  # type: ignore[return-value]

    @property
    def _method(self) -> Any:
        if not self._flag("use_peft", default=False):
            return "full"
        targets = self._arguments.get("lora_target_modules")
        rank = self._count("lora_r", 16)
        lora: dict[str, Any] = {"r": rank, "alpha": self._count("lora_alpha", 32)}
        if targets and targets != ["all-linear"]:
            lora["target_modules"] = targets
        return {"qlora" if self._flag("load_in_4bit", default=False) else "lora": lora}

    @property
    def _precision(self) -> str:
        if self._flag("fp16", default=False):
            return "fp16"
        return "bf16" if self._flag("bf16", default=True) else "no"


def _read(words: Iterable[str]) -> dict[str, list[str]]:
    """The values of each argument; `--name value`, `--name=value`, and dashes for underscores are alike."""
    found: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if value else []
        elif name is not None:
            found[name].append(word)
    return found


def _with_argument(words: list[str], name: str, value: int) -> list[str]:
    """The words of a command, in which an argument has another value."""
    changed = list(words)
    for at, word in enumerate(words):
        spelled, has_value, _ = word.partition("=")
        if word.startswith("--") and spelled[2:].replace("-", "_") == name:
            if has_value:
                changed[at] = f"{spelled}={value}"
            else:
                changed[at + 1 : at + 2] = [str(value)]
    return changed
