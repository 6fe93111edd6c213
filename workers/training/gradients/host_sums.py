"""Sums a GPU's gradients in host memory while the backward pass goes on.

Each gradient is copied to pinned memory on a stream of its own, and a thread adds it to its sum once it has
arrived. At most `PENDING_BYTES` of gradients, or a single larger one, wait on the device. Each parameter's
gradients are added in the order in which they were computed, so that the sums are the same, bit for bit, as
without the thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

PENDING_BYTES = 64 * 2**20
"""Gradients that may wait on the device; if a single one is larger, it waits alone."""


class HostSums:
    """The sums of parameters' gradients on the host, at least in fp32.

    Args:
        device: where gradients are computed.
        copy: begins to copy a gradient to the host. Returns the copy, and a function that waits until it is
            complete. None: on a stream of the device.
    """

    def __init__(
        self,
        device: torch.device,
        copy: Callable[[Tensor], tuple[Tensor, Callable[[], object]]] | None = None,
    ) -> None:
        self._copy = copy or _Stream(device).copy
        self._sums: dict[Tensor, Tensor] = {}
        self._thread = ThreadPoolExecutor(1, "host-sums")
        self._last: Future[None] | None = None
        self._error: BaseException | None = None
        self._waiting = 0
        self._less = threading.Condition()

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Begins to add a gradient to its parameter's sum."""
        with self._less:
            self._less.wait_for(lambda: not self._waiting or self._waiting + gradient.nbytes <= PENDING_BYTES)
            self._waiting += gradient.nbytes
        try:
            copied, wait = self._copy(gradient)
            self._last = self._thread.submit(self._arrived, parameter, [gradient], copied, wait)
        except BaseException:
            self._release(gradient.nbytes)
            raise

    def sums(self) -> dict[Tensor, Tensor]:
        """The complete sums. Waits for gradients that have not arrived yet.

        Raises:
            RuntimeError: the device or the host failed.
        """
        self._wait()
        if self._error is not None:
            raise self._error
        return self._sums

    def clear(self) -> None:
        """Discards the sums."""
        self._wait()
        self._error = None
        self._sums.clear()

    def close(self) -> None:
        """Ends the thread."""
        self.clear()
        self._thread.shutdown()

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()  # the thread does one after another

    def _arrived(self, parameter: Tensor, gradient: list[Tensor], copied: Tensor, wait: Any) -> None:
        """Adds a gradient; runs in the thread.

        Args:
            gradient: holds the gradient on the device, whose memory can be reused once it is removed.
        """
        try:
            wait()
            gradient.clear()
            held = self._sums.get(parameter)
            if held is None:
                wider = torch.promote_types(copied.dtype, torch.float32)
                self._sums[parameter] = copied.to(wider, copy=True)
            else:
                held.add_(copied)
        except BaseException as error:
            self._error = self._error or error
        finally:
            gradient.clear()
            self._release(copied.nbytes)

    def _release(self, size: int) -> None:
        with self._less:
            self._waiting -= size
            self._less.notify()


class _Stream:
    """Copies tensors to pinned memory on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copied.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return copied, done.synchronize
