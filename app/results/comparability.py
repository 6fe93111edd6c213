"""Whether the losses of several jobs measure the same."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from app.storage.tables import Job

_DECIDE_LOSS = {
    "model_name": "models",
    "sha256": "training files",
    "max_length": "lengths",
    "overlength": "treatments of long samples",
    "validation": "held-out samples",
    "objective": "objectives",
}


_DECIDE_TRAINING_LOSS = {**_DECIDE_LOSS, "label_smoothing": "amounts of label smoothing"}
"""Validation losses are never smoothed."""


def why_not_comparable(jobs: Sequence[Job], *, by_validation: bool = False) -> str | None:
    """Why losses of jobs cannot be compared; None if they can.

    Args:
        by_validation: compare validation losses, not training losses.
    """
    decide = _DECIDE_LOSS if by_validation else _DECIDE_TRAINING_LOSS
    differing = [what for field, what in decide.items() if len(_distinct(jobs, field)) > 1]
    return f"their losses cannot be compared, since {' and '.join(differing)} vary" if differing else None


def _distinct(jobs: Iterable[Job], field: str) -> set[str]:
    """The different values of what a job's losses depend on, besides its training."""
    found = set()
    for job in jobs:
        spec, data = job.spec, job.spec["data"]
        own: Any = spec["model"]["name"] if field == "model_name" else data.get(field)
        if field in ("objective", "label_smoothing"):
            own = spec.get(field) or None
        if field == "validation" and own is not None:
            seed = None if own["share"] is None else spec["seed"]  # which draws the samples that are held out
            own = [{name: value for name, value in own.items() if name != "file_id"}, seed]
        found.add(json.dumps(own, sort_keys=True))
    return found
