"""Turns a job's row into the API's answer."""

import json
from typing import Any

from app.contract.plan import Plan
from app.contract.spec import Spec
from app.contract.states import ENDED
from app.jobs.lifecycle import Submission
from app.jobs.parent_jobs import is_model_deleted
from app.jobs.response_schemas import (
    AccumulationStatus,
    DatasetResponse,
    DryRunResponse,
    ErrorResponse,
    JobResponse,
    Links,
    Progress,
    ReplicaResponse,
    ResultResponse,
)
from app.jobs.waiting import WaitingReasons
from app.statistics.performance import Speed
from app.storage.tables import Job

PREFIX = "/gradient-accumulation"


def job_answer(waiting_reasons: WaitingReasons, job: Job) -> JobResponse:
    """Everything about a job, in the native API's form."""
    spec, plan = Spec.model_validate(job.spec), Plan.model_validate(job.plan)
    progress = Progress.model_validate({"steps_total": plan.steps_total, **_without_nulls(job.progress)})
    if job.status != "running":  # an interrupted window starts over
        progress.within_window, progress.eta_seconds = False, None
    steps, micro_batch = _split(job, spec, plan, progress)
    return JobResponse(
        id=job.id,
        training_id=job.id,
        status=job.status,
        requested=job.requested,
        created_at=int(job.created_at),
        started_at=_as_int(job.started_at),
        finished_at=_as_int(job.finished_at),
        model_name=job.model_name,
        user_id=job.user_id,
        metadata=job.client_metadata,
        requirements=json.loads(job.requirements),
        priority=job.priority,
        attempt=job.attempt,
        config=job.config,
        training_config=job.training_config,
        dataset=_dataset(spec),
        device=job.device,
        accumulation_status=_accumulation_status(job, spec, steps, progress),
        plan=plan,
        progress=progress,
        result=_result(job),
        error=ErrorResponse.model_validate(job.error) if job.error else None,
        waiting=waiting_reasons.of(job),
        tune=spec.tune,
        links=_links(job, spec),
        learning_rate=spec.optimizer.learning_rate,
        effective_batch_size=spec.effective_batch_size,
        accumulation_steps=steps,
        actual_batch_size_per_gpu=micro_batch,
    )


def dry_run_answer(
    submission: Submission, speed: Speed | None, tokens: int | None, hour_cost: float | None = None
) -> DryRunResponse:
    """What a job would do, in the fields of a job's answer.

    Args:
        tokens: in all samples of the run.
        hour_cost: the cost of one GPU for one hour; None: unknown.
    """
    spec, plan = submission.spec, submission.plan
    seconds = plan.predicted_duration_seconds
    hours = None
    if seconds is not None and plan.device == "cuda":
        hours = seconds * len(plan.ranks) / 3600
    return DryRunResponse(
        predicted_tokens=tokens,
        predicted_duration_seconds=seconds,
        predicted_duration_range=plan.predicted_duration_range,
        gpu_hours=hours,
        gpu_cost=hours * hour_cost if hours is not None and hour_cost is not None else None,
        measured_by=speed.job_id if speed is not None else None,
        model_name=spec.model.name,
        config=submission.config,
        training_config=submission.training_config,
        dataset=_dataset(spec),
        plan=plan,
        learning_rate=spec.optimizer.learning_rate,
        effective_batch_size=spec.effective_batch_size,
        accumulation_steps=plan.accumulation_steps,
        actual_batch_size_per_gpu=plan.actual_batch_size_per_gpu,
    )


def _dataset(spec: Spec) -> DatasetResponse:
    data = spec.data
    return DatasetResponse(
        file_id=data.file_id,
        format=data.format,
        examples=data.examples,
        max_length=data.max_length,
        overlength=data.overlength,
    )


def _split(job: Job, spec: Spec, plan: Plan, progress: Progress) -> tuple[int, int]:
    """Accumulation steps of each device, and samples per micro-batch: the averages of a job that has ended,
    otherwise those planned for samples of full length."""
    if job.status not in ENDED or not progress.step:
        return plan.accumulation_steps, plan.actual_batch_size_per_gpu
    devices = len(progress.ranks or [None])
    steps = max(1, round(progress.micro_step / (progress.step + progress.skipped) / devices))
    shared = 1 if spec.strategy == "independent" else devices
    return steps, -(-spec.effective_batch_size // (steps * shared))


def _accumulation_status(job: Job, spec: Spec, steps: int, progress: Progress) -> AccumulationStatus:
    return AccumulationStatus(
        enabled=bool(job.config["use_gradient_accumulation"]),
        steps=steps,
        effective_batch_size=spec.effective_batch_size,
        sync_gradients=spec.strategy != "independent",
        clip_before_accumulation=spec.clip_mode == "each_micro_batch",
        accumulate_on_cpu=spec.accumulate_gradients_on_cpu,
        accumulation_step=progress.accumulation_step,
    )


def _result(job: Job) -> ResultResponse | None:
    if not job.result:
        return None
    result = job.result
    return ResultResponse(
        model_path=f"runs/{job.id}/model" if has_model(job) else None,
        files=result["files"] if has_model(job) else [],
        first_loss=result["first_loss"],
        eval_loss=result.get("eval_loss"),
        eval_token_accuracy=result.get("eval_token_accuracy"),
        eval_exact_match=result.get("eval_exact_match"),
        eval_rewards=result.get("eval_rewards"),
        best_step=result.get("best_step"),
        equivalence_error=result.get("equivalence_error"),
        noise_scale=result.get("noise_scale"),
        tuning=result.get("tuning"),
        final_loss=result["final_loss"],
        trained_tokens=result["trained_tokens"],
        effective_batch_size=result["effective_batch_size"],
        replicas=_replicas(job, result.get("replicas")),
    )


def has_model(job: Job) -> bool:
    """Whether the job made a model, which has not been deleted."""
    return bool(job.result and job.result["files"]) and not is_model_deleted(job.result)


def _replicas(job: Job, found: list[dict[str, Any]] | None) -> list[ReplicaResponse] | None:
    if not found:
        return None
    own = f"{PREFIX}/training/{job.id}/model?replica="
    return [
        ReplicaResponse(**{**each, "model": f"{own}{each['replica']}" if has_model(job) else None})
        for each in found
    ]


def _links(job: Job, spec: Spec) -> Links:
    own = f"{PREFIX}/training/{job.id}"
    return Links(
        self=own,
        metrics=f"{own}/metrics",
        log=f"{own}/log",
        events=f"{own}/events",
        stats=f"{PREFIX}/stats/{job.id}",
        model=f"{own}/model" if has_model(job) else None,
        profile=f"{own}/profile" if spec.profile else None,
    )


def _without_nulls(progress: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in progress.items() if value is not None}


def _as_int(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
