"""Collects a job's measurements, and passes them to advice.py."""

import socket

from app.contract.plan import Plan, TokenBudget
from app.contract.spec import Spec
from app.devices import gpus
from app.planning.advice import Figures, advise
from app.planning.devices import GIB
from app.planning.recommendation_inputs import samples_known
from app.statistics import performance
from app.storage.session import Session
from app.storage.tables import Job, Worker


def advice_for(session: Session, job: Job) -> list[str]:
    """Advice on a job, as sentences."""
    measured = performance.of_job(session, job).stats
    if not measured.steps:
        return [f"Job {job.id} has not completed a step yet: try again later."]
    spec, plan = Spec.model_validate(job.spec), Plan.model_validate(job.plan)
    share, device = performance.performance(session, job).share, plan.ranks[0]
    advice = advise(
        Figures(
            padding_share=measured.padding_share,
            data_share=share.get("data", 0.0),
            optimizer_share=share.get("optimizer", 0.0),
            micro_batches_per_step=measured.micro_steps / measured.steps,
            skipped=measured.skipped,
            size_is_planned=isinstance(device.micro_batch_rule, TokenBudget) or plan.micro_batches == 1,
            on_gpu=plan.device == "cuda",
            peak_bytes=None if measured.peak_memory_gb is None else measured.peak_memory_gb * GIB,
            limit_bytes=device.memory_limit_bytes,
            micro_batch=device.micro_batch_size,
            gradient_checkpointing=spec.gradient_checkpointing,
            clips_each_micro_batch=spec.clip_mode == "each_micro_batch",
            clipping=spec.gradient_clipping,
            effective_batch=spec.effective_batch_size,
            samples=samples_known(spec),
            load=_load(session, job),
        )
    )
    return advice or ["Nothing stands out in this job's measurements."]


def _load(session: Session, job: Job) -> float | None:
    """The utilisation of the first GPU that a running job uses; None if that GPU is not in this machine."""
    worker = session.get(Worker, job.worker_id) if job.status == "running" else None
    if worker is None or worker.hostname != socket.gethostname():
        return None
    own = gpus.ids_of(job.device)
    return next((gpu.load for gpu in gpus.detected() if gpu.id in own), None)
