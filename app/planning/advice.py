"""Advice on a job from its measurements."""

from dataclasses import dataclass

from app.planning.recommendations import recommended_batch

_WASTED = 0.1
_MANY_STEPS = 8
_OPTIMIZER_SHARE = 0.15
_ROOMY, _FULL = 0.6, 0.8
_IDLE = 0.5


@dataclass(frozen=True)
class Figures:
    """Measured figures; None where nothing was measured. Shares are between 0 and 1, memory is in bytes."""

    padding_share: float | None
    data_share: float
    """The share of time spent waiting for data."""
    optimizer_share: float
    micro_batches_per_step: float
    skipped: int
    size_is_planned: bool
    """Whether the plan chose the size of the micro-batches, instead of the request."""
    on_gpu: bool
    peak_bytes: float | None
    limit_bytes: int
    micro_batch: int
    """Samples of the plan's micro-batch."""
    gradient_checkpointing: bool
    clips_each_micro_batch: bool
    clipping: float | None
    effective_batch: int
    samples: int | None
    """The number of training samples."""
    load: float | None = None
    """The utilisation of the GPU while the job runs."""


def advise(figures: Figures) -> list[str]:
    """Sentences, each with the figure that it follows from."""
    return [
        *_of_the_time(figures),
        *_of_memory(figures),
        *_of_clipping(figures),
        *_of_the_batch(figures),
    ]


def _of_the_time(figures: Figures) -> list[str]:
    advice = []
    if figures.padding_share is not None and figures.padding_share > _WASTED:
        remedy = "set packing" if figures.size_is_planned else "leave the split to the plan, or set packing"
        advice.append(f"{figures.padding_share:.0%} of the work went into padding: {remedy}.")
    if figures.data_share > _WASTED:
        advice.append(
            f"The device waited for data {figures.data_share:.0%} of the time: check the disk, or give the "
            "worker more CPU time."
        )
    if figures.load is not None and figures.load < _IDLE:
        advice.append(
            f"The GPU is busy {figures.load:.0%} of the time: larger micro-batches would keep it busier."
        )
    if figures.optimizer_share > _OPTIMIZER_SHARE:
        advice.append(
            f"The optimizer takes {figures.optimizer_share:.0%} of a window: a larger effective batch "
            "makes fewer "
            "steps for the same samples, and LoRA trains fewer parameters."
        )
    if figures.skipped:
        advice.append(
            f"{figures.skipped} windows were skipped: the job's events say why, and name the samples at "
            "fault."
        )
    return advice


def _of_memory(figures: Figures) -> list[str]:
    """Advice on unused memory, many small micro-batches, and gradient checkpointing."""
    steps, used = figures.micro_batches_per_step, None
    if figures.peak_bytes is not None and figures.on_gpu:
        used = figures.peak_bytes / figures.limit_bytes
    roomy, full = used is not None and used < _ROOMY, used is not None and used > _FULL
    of_memory = f"{used:.0%} of the memory that may be used" if used is not None else ""
    if figures.gradient_checkpointing and roomy:
        return [
            f"The peak was {of_memory}. Without gradient_checkpointing, a step takes about a quarter less "
            "time (Chen et al. 2016); calculate-batch-size shows whether it would fit."
        ]
    if steps <= _MANY_STEPS:
        return [f"The peak was {of_memory}: larger micro-batches would fit."] if roomy and steps > 1.5 else []
    if roomy:
        return [
            f"Each step has {steps:.0f} micro-batches, with a peak of {of_memory}: larger micro-batches "
            "would keep the device busier."
        ]
    if full and not figures.gradient_checkpointing and figures.micro_batch <= 2:
        return [
            f"Each step has {steps:.0f} micro-batches of at most {figures.micro_batch} samples, at "
            f"{of_memory}: with gradient_checkpointing, more samples fit at once. It costs about a "
            "third more "
            "computation, which is worthwhile if such small micro-batches leave the device idle."
        ]
    return [
        f"Each step has {steps:.0f} micro-batches: if memory allows, larger ones would keep the device "
        "busier."
    ]


def _of_clipping(figures: Figures) -> list[str]:
    steps = round(figures.micro_batches_per_step)
    if not figures.clips_each_micro_batch or figures.clipping is None or steps < 2:
        return []
    return [
        f"The running sum of gradients is clipped to {figures.clipping:g} after each of a window's {steps} "
        "micro-batches. Once it reaches the limit, later micro-batches count more than earlier ones. Use "
        "clip_mode after_accumulation, which clips the whole window's gradient once."
    ]


def _of_the_batch(figures: Figures) -> list[str]:
    if figures.samples is None or figures.samples < 2:
        return []
    share, usual = figures.effective_batch / figures.samples, recommended_batch(figures.samples)
    if share > 0.01 and figures.effective_batch > usual:
        return [
            f"The effective batch of {figures.effective_batch} is {share:.1%} of the data; 0.1 to 1 % "
            "is usual. "
            f"An effective batch of {usual} gives more steps per epoch."
        ]
    if share < 0.001 and figures.effective_batch < usual:
        return [
            f"The effective batch of {figures.effective_batch} is {share:.2%} of the data; 0.1 to 1 % "
            "is usual. "
            f"An effective batch of {usual} gives steadier steps."
        ]
    return []
