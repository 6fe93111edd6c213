"""The states of a job, as service, worker and clients name them."""

from typing import Literal

JobStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]


RequestedAction = Literal["pause", "cancel", "stop"]


ENDED: tuple[JobStatus, ...] = ("succeeded", "failed", "cancelled")
