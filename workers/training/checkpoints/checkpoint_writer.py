"""Writes checkpoints: of a GPU's run in the background, from a copy in host memory, while training goes on.

The copy is in pinned memory, so that the device writes to it directly, and its memory is used again for the
next checkpoint. In three cases, training waits until the checkpoint is on disk: the host has too little
memory for the copy; ranks hold parts of the model (the collected parts are on the host already); or training
is on a CPU, where the copy would take memory that the plan has given to training.
"""

import copy
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from workers.training.checkpoints import checkpoint
from workers.training.checkpoints.checkpoint import Content
from workers.training.checkpoints.state import RunState
from workers.training.devices import device_errors, host_memory

_SHARE_OF_HOST = 0.5
"""The most of the available host memory that the copy may take."""

Written = tuple[int, Path | None]
"""The step of a checkpoint that is on disk, and its path; None if an identical one existed already."""


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    Args:
        folder: where they go.
        in_background: whether training may go on meanwhile.
    """

    def __init__(self, folder: Path, *, in_background: bool) -> None:
        self._folder = folder
        self._buffers: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._pending: tuple[int, Future[Path | None]] | None = None

    def write(self, state: RunState, content: Content) -> list[Written]:
        """Begins to write a checkpoint; waits for one that is being written.

        Returns:
            The checkpoints that are on disk now and were not returned before.

        Raises:
            OSError: this checkpoint could not be written. If only the earlier one, which was still being
                written, failed, there is no error: this newer checkpoint replaces it.
        """
        try:
            done = self.wait()
            copied = self._copy(content) if self._has_memory(content) else None
        except OSError:  # this newer checkpoint replaces the one that could not be written
            done, copied = [], None
        if self._thread is None or copied is None:
            return [*done, (state.step, checkpoint.save(self._folder, state, content))]
        future = self._thread.submit(checkpoint.save, self._folder, copy.deepcopy(state), copied)
        self._pending = state.step, future
        return done

    def written(self) -> list[Written]:
        """The checkpoint that was written in the background, if it is on disk and was not returned before;
        does not wait.

        Raises:
            OSError: it could not be written.
        """
        return self.wait() if self._pending is not None and self._pending[1].done() else []

    def wait(self) -> list[Written]:
        """Waits until the checkpoint that is being written is on disk.

        Raises:
            OSError: it could not be written.
        """
        if self._pending is None:
            return []
        (step, future), self._pending = self._pending, None
        return [(step, future.result())]

    def close(self) -> None:
        """Ends the thread, after what it is writing."""
        if self._thread is not None:
            self._thread.shutdown()
        self._buffers.clear()

    def _has_memory(self, content: Content) -> bool:
        if self._thread is None or self._buffers:
            return self._thread is not None
        return _bytes_of(content) < _SHARE_OF_HOST * host_memory.available_on_host()

    def _copy(self, content: Content) -> Content | None:
        """A copy of the content in host memory. None if there is too little memory after all; later
        checkpoints are then written without a copy, too."""
        try:
            weights, states = self._held("weight", content.weights), self._held("state", content.states)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and not device_errors.is_out_of_memory(error):
                raise
            self.close()
            self._thread = None
            return None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Content(weights, states, dict(content.numbers), list(content.updates))

    def _held(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get(f"{kind}:{name}")
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=torch.cuda.is_available()
                )
                self._buffers[f"{kind}:{name}"] = buffer
            held[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        return held


def _bytes_of(content: Content) -> int:
    """The pinned memory of a copy: PyTorch rounds each tensor up to a power of two
    (aten/src/ATen/core/CachingHostAllocator.h)."""
    tensors = (*content.weights.values(), *content.states.values())
    return sum(1 << max(0, each.nbytes - 1).bit_length() for each in tensors)
