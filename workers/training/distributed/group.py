"""The group of ranks that train a run together. Each rank is a process with a device of its own.

Ranks exchange gradients on their devices, once per window, and a few numbers on the host. Every decision is
made from these numbers, which are the same on all ranks, so that all ranks make the same decision.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from app.contract.plan import Plan
from workers.training.distributed.rank_launcher import RENDEZVOUS_VARIABLE
from workers.training.distributed.rank_timeout import RankTimeout, WindowSize
from workers.training.exceptions import LostRank

TIMEOUT = timedelta(days=7)
"""Ranks wait this long for each other. Rank 0 may tokenise for hours while the others wait; the launcher
notices ranks that ended or hang (rank_launcher.py)."""


class Pending(Protocol):
    """An exchange in progress."""

    def wait(self) -> object: ...


class Group:
    """A group of one rank: there is nothing to exchange."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes what a run writes once."""
        return self.rank == 0

    def begin_all_reduce(self, tensor: Tensor) -> Pending | None:
        """Starts to replace a tensor on the group's device by its sum over all ranks.

        Returns:
            What to wait for before the tensor is used; None if it is the sum already.
        """
        return None

    def begin_all_to_all(self, sent: Tensor, received: Tensor) -> Pending:
        """Starts to send row r of `sent` to rank r, and to fill row r of `received` from rank r.

        Args:
            sent: of shape (ranks, …).
        """
        received.copy_(sent)
        return _Done()

    def begin_all_gather(self, own: Tensor, received: Tensor) -> Pending:
        """Starts to fill row r of `received`, of shape (ranks, …), with rank r's `own`."""
        received.copy_(own)
        return _Done()

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over all ranks, in fp64; the same bits on every rank."""
        return list(numbers)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Whether each flag is set on any rank."""
        return flags

    def all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of each rank, in fp64; every rank gives equally many."""
        before, after = self.rank * len(numbers), (self.size - self.rank - 1) * len(numbers)
        together = self.sum([0.0] * before + list(numbers) + [0.0] * after)
        return [together[at : at + len(numbers)] for at in range(0, len(together), len(numbers))]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value of this call on every rank; anything that JSON can hold."""
        return value

    def wait(self) -> None:
        """Returns once all ranks have called it."""

    def limited_waiting(self, size: WindowSize) -> AbstractContextManager[None]:
        """Within the block, ends a rank that waits for another one for far longer than a window can take."""
        return contextlib.nullcontext()

    def note_window(self, seconds: float, size: WindowSize) -> None:
        """Notes how long a window took."""

    def waiting(self) -> AbstractContextManager[None]:
        """Surrounds what may wait for other ranks."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Ends the exchange."""


@dataclass(frozen=True)
class _Done:
    def wait(self) -> None:
        """Returns at once: a group of one rank exchanges nothing."""


ALONE = Group()


class ProcessGroup(Group):
    """Ranks in processes of their own, connected by torch.distributed.

    Args:
        gradients: exchanges gradients.
        host: exchanges numbers on the host, by gloo. It has connections of its own, since ranks begin to
            exchange gradients at different times.
    """

    def __init__(self, rank: int, size: int, gradients: Any, host: Any) -> None:
        self.rank, self.size = rank, size
        self.gradients, self._host = gradients, host
        self._timeout = RankTimeout()

    @classmethod
    def connected(cls, rank: int, size: int, backend: Literal["gloo", "nccl"]) -> Self:
        """Connects this process with the other ranks.

        Args:
            backend: what exchanges gradients: NCCL between GPUs, of which each rank needs one of its own;
                gloo otherwise.

        Raises:
            LostRank: another rank ended first.
        """
        file = os.environ.get(RENDEZVOUS_VARIABLE)
        with _connecting():
            dist.init_process_group(
                backend,
                init_method=f"file://{file}" if file else "env://",
                rank=rank,
                world_size=size,
                timeout=TIMEOUT,
            )
            host = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return cls(rank, size, dist.group.WORLD, host)

    def begin_all_reduce(self, tensor: Tensor) -> Pending | None:
        with self.waiting():
            return _Pending(self, dist.all_reduce(tensor, group=self._group_for(tensor), async_op=True))

    def begin_all_to_all(self, sent: Tensor, received: Tensor) -> Pending:
        with self.waiting():
            group = self._group_for(sent)
            return _Pending(self, dist.all_to_all_single(received, sent, group=group, async_op=True))

    def begin_all_gather(self, own: Tensor, received: Tensor) -> Pending:
        with self.waiting():
            group = self._group_for(own)
            return _Pending(self, dist.all_gather(list(received.unbind()), own, group=group, async_op=True))

    def _group_for(self, tensor: Tensor) -> Any:
        """NCCL cannot send what is in host memory."""
        on_host = tensor.device.type == "cpu" and dist.get_backend(self.gradients) != "gloo"
        return self._host if on_host else self.gradients

    def sum(self, numbers: Sequence[float]) -> list[float]:
        together = torch.tensor(numbers, dtype=torch.float64)
        with self.waiting():
            dist.all_reduce(together, group=self._host)
        summed: list[float] = together.tolist()
        return summed

    def any(self, *flags: bool) -> tuple[bool, ...]:
        together = torch.tensor(flags, dtype=torch.int32)
        with self.waiting():
            dist.all_reduce(together, group=self._host)
        return tuple(count > 0 for count in together.tolist())

    def broadcast(self, value: Any) -> Any:
        content = json.dumps(value).encode() if self.leads else b""
        (length,) = self.sum([len(content)])
        together = torch.zeros(int(length), dtype=torch.uint8)
        if self.leads:
            together.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        with self.waiting():
            dist.broadcast(together, 0, group=self._host)
        return json.loads(bytes(together.tolist()))

    def wait(self) -> None:
        self.any(False)

    def limited_waiting(self, size: WindowSize) -> AbstractContextManager[None]:
        return self._timeout.limited_waiting(size)

    def note_window(self, seconds: float, size: WindowSize) -> None:
        self._timeout.note_window(seconds, size)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        with self._timeout.waiting(), _connected():
            yield

    def close(self) -> None:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Pending:
    group: Group
    work: Any

    def wait(self) -> None:
        with self.group.waiting():
            self.work.wait()


@contextlib.contextmanager
def connect(plan: Plan, rank: int, size: int) -> Iterator[Group]:
    """Connects a rank to the others, until the end of the block.

    Raises:
        LostRank: another rank ended before it could be connected.
        ValueError: the plan is for another number of ranks.
    """
    if size == 1:
        yield ALONE
        return
    if size != len(plan.ranks):
        raise ValueError(f"{size} ranks were started, but the plan has {len(plan.ranks)}")
    shared = len({each.gpu_id for each in plan.ranks}) < size
    sliced = any(" MIG " in (each.name or "") for each in plan.ranks)  # NCCL takes two slices for one GPU
    by_nccl = plan.device == "cuda" and not shared and not sliced
    group = ProcessGroup.connected(rank, size, "nccl" if by_nccl else "gloo")
    yield group
    group.close()


@contextlib.contextmanager
def _connecting() -> Iterator[None]:
    """Recognises errors while ranks connect.

    Raises:
        LostRank: another rank has ended or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
            raise
        raise LostRank(_first_line(error)) from error


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Recognises errors of the connection to other ranks, among those of a device or of the model.

    Raises:
        LostRank: another rank has ended or does not answer.
    """
    try:
        yield
    except dist.DistError as error:  # NCCL's, and those of the store
        raise LostRank(_first_line(error)) from error
    except RuntimeError as error:
        if "/gloo/" not in str(error):  # gloo's errors name their place in its source
            raise
        raise LostRank(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
