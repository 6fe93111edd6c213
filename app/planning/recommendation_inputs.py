"""The evidence for recommendations: the user's choices, and what jobs measured."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import select

from app.contract.accumulation import ClipMode
from app.contract.architecture import Architecture
from app.contract.reports import NoiseScale
from app.contract.spec import OptimizerName, Spec
from app.errors import Unprocessable
from app.memory_profiles import measurements, profiles
from app.planning.architectures import from_config
from app.planning.catalogue import CATALOGUE
from app.planning.defaults import DEFAULT_EPOCHS, DEFAULT_MAX_LENGTH, memory_limits, method_spec
from app.planning.devices import Device, common_name
from app.planning.planner import Question, Solution, alternatives, solve
from app.planning.recipes import least_capable, make_recipe, unsupported
from app.planning.recommendations import (
    SIZES,
    MeasuredNoise,
    MeasuredRate,
    ModelKind,
    Situation,
    recommended_batch,
)
from app.planning.schemas import Recommendation
from app.planning.sharding import may_shard
from app.storage.session import Session
from app.storage.tables import Job

NEWEST = 20


@dataclass(frozen=True)
class Choices:
    """Choices that recommendations must respect; None: recommended, or the default."""

    target: int | None
    optimizer: OptimizerName | None
    method: Literal["full", "lora", "qlora"] | None
    samples: int | None
    clip_mode: ClipMode | None
    kind: ModelKind

    def completed_from(self, job: Job) -> "Choices":
        """These choices, completed from the job's; its batch is used only if it measured no noise scale."""
        spec = Spec.model_validate(job.spec)
        return replace(
            self,
            target=self.target or (spec.effective_batch_size if noise_of(job) is None else None),
            optimizer=self.optimizer or spec.optimizer.name,
            method=self.method or spec.method.name,
            samples=self.samples or samples_known(spec),
            clip_mode=self.clip_mode or spec.clip_mode,
        )


_WARMUP_SHARE = 0.1


def submission(
    recommended: dict[str, Recommendation],
    method: str,
    devices: int,
    steps_total: int | None,
    *,
    fixes_split: bool,
) -> dict[str, Any]:
    """The recommended values as part of a request for a job.

    Args:
        fixes_split: whether to request the micro-batch and the accumulation steps, since the training
            depends on them (`clip_mode: each_micro_batch`). Otherwise they are left to the plan, which also
            uses the lengths of the data.
        devices: the number of devices that they are for.
        steps_total: the length of the run; None: not known. Its warmup is then requested as a share of the
            steps, which may be fewer than the recommended warmup.
    """
    warmup = {} if steps_total is not None else {"warmup_ratio": _WARMUP_SHARE}
    choices = ("learning_rate", *(("warmup_steps",) if steps_total is not None else ()), "optimizer",
               "gradient_checkpointing")  # fmt: skip
    of = {name: own.value for name, own in recommended.items()}
    split = ("micro_batch_size", "accumulation_steps") if fixes_split else ()
    return {
        "target_effective_batch_size": of["effective_batch_size"],
        **{name: of[name] for name in split},
        **({"num_gpus": devices} if devices > 1 else {}),
        "gradient_clipping": of["gradient_clipping"],
        "mixed_precision": of["precision"],
        "training_config": {name: of[name] for name in choices} | warmup | {"method": method},
    }


def samples_known(spec: Spec) -> int | None:
    """The number of training samples, without those held out; None if it depends on the tokenizer."""
    return None if spec.data.overlength == "split" else spec.data.examples - spec.data.held_out()


def noise_of(job: Job) -> MeasuredNoise | None:
    """The noise scale that a finished job measured; None if it measured none."""
    scale = (job.result or {}).get("noise_scale")
    if scale is None:
        return None
    samples = samples_known(Spec.model_validate(job.spec))
    return MeasuredNoise(job.id, NoiseScale.model_validate(scale), samples)


def _rate_of(job: Job) -> MeasuredRate | None:
    """The learning rate of a job that succeeded with a loss that fell."""
    result = job.result or {}
    first, last = result.get("first_loss"), result.get("final_loss")
    if job.status != "succeeded" or first is None or last is None:
        return None
    if not last < first - _LEAST_FALL * abs(first):
        return None
    spec = Spec.model_validate(job.spec)
    return MeasuredRate(
        job.id,
        spec.optimizer.learning_rate,
        spec.effective_batch_size,
        spec.optimizer.name,
        spec.method.lora is not None,
        first,
        last,
    )


_LEAST_FALL = 0.01
"""The share of its first value by which a loss must have fallen: less says nothing of the learning rate."""


def _newest(session: Session, model_name: str) -> list[Job]:
    """The newest finished jobs that fine-tuned a model on texts; other objectives need other rates and
    batches."""
    is_sft = Job.spec["objective"]["name"].as_string().is_(None)
    finished = select(Job).where(Job.model_name == model_name, Job.status == "succeeded", is_sft)
    return list(session.scalars(finished.order_by(Job.id.desc()).limit(NEWEST)))


def situation(
    session: Session,
    architecture: Architecture,
    requested: Choices,
    devices: list[Device],
    model_name: str | None,
    job: Job | None,
) -> Situation:
    earlier = [job] if job is not None else _newest(session, model_name) if model_name is not None else []
    noise = next((noise for each in earlier if (noise := noise_of(each)) is not None), None)
    learned = next((rate for each in earlier if (rate := _rate_of(each)) is not None), None)
    spec = None if job is None else Spec.model_validate(job.spec)
    is_of_job = spec is not None and requested.method in (None, spec.method.name)
    method = spec.method if spec is not None and is_of_job else method_spec(requested.method or "full")
    of_objective = {} if spec is None else {"scores": len(spec.scores), "packing": spec.data.packing}
    optimizer = requested.optimizer or "adamw"
    recipe = make_recipe(least_capable(devices), "auto", optimizer, method, **of_objective)
    refused = unsupported(recipe.device, quantised=recipe.quantised, optimizer=recipe.optimizer)
    for field, why in refused.items():
        raise Unprocessable(f"{why}.", field=field)
    limits = memory_limits(0.9, None, measurements.margin(session, recipe.device))
    usual = min(architecture.positions, DEFAULT_MAX_LENGTH)
    sequence = usual if spec is None or job is None else _sample_length(spec, job)
    sequences = 1 if spec is None else spec.data.sequences_per_sample
    batch = requested.target or recommended_batch(requested.samples)
    known = profiles.known(session, architecture, common_name(devices))
    question = Question(
        recipe,
        sequence,
        devices,
        limits,
        batch,
        sequences_per_sample=sequences,
        may_shard=requested.clip_mode != "each_micro_batch" and (spec is None or may_shard(spec)),
    )
    solution = solve(question, known)
    needs_checkpointing = not _largest(solution)
    if needs_checkpointing:
        checkpointed = recipe.model_copy(update={"gradient_checkpointing": True})
        solution = solve(replace(question, recipe=checkpointed), known)
    others = alternatives(solution, known) if not _largest(solution) else []
    return Situation(
        architecture=architecture,
        target=requested.target,
        micro_batch=_largest(solution),
        devices=len(devices),
        device_kind=devices[0].kind,
        source=solution.estimate.source,
        checkpointing=needs_checkpointing,
        remedy=next((other.change for other in others if other.fits), None),
        precision=recipe.precision,
        optimizer=requested.optimizer,
        adapters=method.lora is not None,
        samples=requested.samples,
        clip_mode=requested.clip_mode or "after_accumulation",
        measured_rate=learned,
        noise=noise,
        sample_tokens=sequence,
        useful=min(rank.capacity.useful for rank in solution.ranks),
        useful_is_measured=solution.throughput is not None and solution.throughput.reached_plateau,
        kind=requested.kind,
        steps_total=_steps_total(job, requested, batch),
        objective="sft" if spec is None or spec.objective is None else spec.objective.name,
    )


def _sample_length(spec: Spec, job: Job) -> int:
    """The sample length that a job's plan assumes: that of its longest sample, once lengths are measured."""
    assumed = job.plan.get("sample_length")
    return spec.data.max_length if assumed is None else int(assumed)


def _largest(solution: Solution) -> int:
    """The largest micro-batch that fits on each device; 0: none does."""
    return min(rank.capacity.largest for rank in solution.ranks)


def _steps_total(job: Job | None, requested: Choices, batch: int) -> int | None:
    """The number of steps of the job, or of a job with the default number of epochs."""
    if job is not None and (total := job.plan["steps_total"] or job.progress.get("steps_total")):
        return int(total)
    return None if requested.samples is None else DEFAULT_EPOCHS * -(-requested.samples // batch)


_UNITS = {"m": 10**6, "b": 10**9}
"""Suffixes of numbers such as 350m and 2b."""


def architecture_of_size(size: str) -> Architecture:
    """The catalogue's architecture nearest to a size, with its parameter count set to that size."""
    try:
        number, unit = (size[:-1], size[-1].lower()) if size[-1:].lower() in _UNITS else (size, "")
        parameters = SIZES.get(size.lower()) or int(float(number) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        parameters = 0
    if not 0 < parameters <= 10**13:
        raise Unprocessable(
            f"model_size {size} is not one of {', '.join(SIZES)} or a parameter count.", field="model_size"
        )
    nearest = min(
        (from_config(config) for config in CATALOGUE.values()), key=lambda a: abs(a.parameters - parameters)
    )
    return nearest.model_copy(update={"parameters": parameters})
