"""The plan: how a spec is run on the available devices. It never changes the training (docs/idea.md)."""

from typing import Annotated, Any, Literal

from pydantic import Field, computed_field, model_validator

from app.contract.base import Frozen
from app.contract.spec import RunPrecision, Strategy, ZeroStage

Source = Literal["measured", "simulated", "formula"]
"""Where a prediction is from, best first."""


class TokenBudget(Frozen):
    """Micro-batches of at most this many padded tokens (rows × longest row)."""

    rule: Literal["token_budget"] = "token_budget"
    tokens: int
    unpadded_tokens: int | None = None
    """The budget if the trainer lays samples out without padding although the job did not ask for packing;
    None: the same."""


class FixedCount(Frozen):
    """This many micro-batches per window on each device (fewer if the window has fewer samples), with nearly
    equal numbers of padded tokens."""

    rule: Literal["count"] = "count"
    micro_batches: int


class FixedSize(Frozen):
    """Micro-batches of at most this many samples."""

    rule: Literal["size"] = "size"
    samples: int


MicroBatchRule = Annotated[TokenBudget | FixedCount | FixedSize, Field(discriminator="rule")]
"""How a window (the samples of one optimizer step) is cut into micro-batches."""


class Alternative(Frozen):
    """A change to the request, with the split and the memory predicted for it."""

    change: str
    fits: bool
    micro_batch_size: int
    accumulation_steps: int
    peak_process_bytes: int
    one_sample_bytes: int
    """The predicted peak with one full-length sample per micro-batch: the least that this change needs."""
    source: Source
    zero_stage: ZeroStage | None = Field(
        None, description="What the devices divide among themselves (fsdp); null: each has a full copy (ddp)"
    )
    predicted_samples_per_second: float | None = Field(
        None,
        description="Full-length samples, forward and backward; null: no similar size was measured on this "
        "kind of device",
    )


class RankPlan(Frozen):
    """One device's part of every step."""

    rank: int
    gpu_id: int | str
    name: str | None = None
    """The device's name; None in old plans."""
    micro_batch_rule: MicroBatchRule
    expected_micro_batches: int
    """Micro-batches per step, if every sample has full length."""
    micro_batch_size: int
    """Samples of the largest micro-batch."""
    predicted_peak_bytes: int
    memory_limit_bytes: int
    share_of_tokens: float = 1.0
    """The share of a step's tokens that this device processes."""


class PlannedDevice(Frozen):
    """A rank as responses list it under `devices`."""

    gpu_id: int | str
    name: str | None
    micro_batch_size: int
    accumulation_steps: int
    token_budget: int | None
    predicted_peak_bytes: int
    memory_limit_bytes: int


class Plan(Frozen):
    """How a spec is run on the available devices: one rank for each."""

    predicted: bool
    """true: provisional, made when the job was submitted; false: final, made by the worker for its own
    devices."""
    effective_batch_size: int
    accumulation_steps: int
    actual_batch_size_per_gpu: int
    micro_batches: int
    """Micro-batches per step over all devices, with every sample at its full length."""
    ranks: tuple[RankPlan, ...]
    steps_total: int | None
    """Optimizer steps; null where `overlength: split` leaves the number of samples to the tokenizer."""
    predicted_duration_seconds: float | None
    predicted_duration_range: tuple[float, float] | None = None
    """The range, in seconds, that contains the actual duration about nine times out of ten."""
    source: Source
    warnings: tuple[str, ...]
    precision: RunPrecision
    device: Literal["cpu", "cuda"]
    strategy: Strategy = "ddp"
    """How several ranks share the work: each has a copy of the model (ddp), or a part of it (fsdp)."""
    zero_stage: ZeroStage = 3
    """What ranks divide, if the strategy is fsdp."""
    threads: int | None
    """Threads of the CPU's kernels: they change the order of sums, and so the last bits."""
    sample_length: int | None = None
    """The length that the plan is made for, in tokens: the longest sample's, rounded up, if it was measured;
    otherwise `max_length`. Null, in plans of earlier versions, means `max_length`."""
    most_tokens: int | None = None
    """Padded tokens of the largest micro-batch predicted to fit; None if the request fixed the split."""
    alternatives: tuple[Alternative, ...] = ()
    """Alternatives that need less memory than this plan for one full-length sample, the leanest first."""

    @computed_field(repr=False)  # type: ignore[prop-decorator]
    @property
    def devices(self) -> tuple[PlannedDevice, ...]:
        """The ranks by device."""
        return tuple(
            PlannedDevice(
                gpu_id=rank.gpu_id,
                name=rank.name,
                micro_batch_size=rank.micro_batch_size,
                accumulation_steps=rank.expected_micro_batches,
                token_budget=getattr(rank.micro_batch_rule, "tokens", None),
                predicted_peak_bytes=rank.predicted_peak_bytes,
                memory_limit_bytes=rank.memory_limit_bytes,
            )
            for rank in self.ranks
        )

    @model_validator(mode="before")
    @classmethod
    def _ranks_of_an_earlier_version(cls, given: Any) -> Any:
        """Until November 2026, a plan listed devices that shared one rule (`cut`), and had `remedies`."""
        if not isinstance(given, dict):
            return given
        plan = {name: value for name, value in given.items() if name not in ("devices", "cut", "remedies")}
        if "ranks" not in plan and "cut" in given:
            plan["ranks"] = [
                {
                    "rank": rank,
                    "gpu_id": device["gpu_id"],
                    "name": device.get("name"),
                    "micro_batch_rule": given["cut"],
                    "expected_micro_batches": device["accumulation_steps"],
                    "micro_batch_size": device["micro_batch_size"],
                    "predicted_peak_bytes": device["predicted_peak_bytes"],
                    "memory_limit_bytes": device["memory_limit_bytes"],
                    "share_of_tokens": 1 / len(given["devices"]),
                }
                for rank, device in enumerate(given["devices"])
            ]
            plan["alternatives"] = [
                {
                    "change": remedy["change"],
                    "fits": remedy["predicted_peak_bytes"] <= given["devices"][0]["memory_limit_bytes"],
                    "micro_batch_size": 1,
                    "accumulation_steps": given["effective_batch_size"],
                    "peak_process_bytes": remedy["predicted_peak_bytes"],
                    "one_sample_bytes": remedy["predicted_peak_bytes"],
                    "source": given["source"],
                }
                for remedy in given.get("remedies", ())
            ]
        return plan
