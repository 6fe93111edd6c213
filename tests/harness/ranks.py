"""Four processes that stay connected, and run a function on the first few of them as ranks."""

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Self

MOST = 4

_SECONDS = 240.0


class Died(RuntimeError):
    """A process ended by a signal."""


class Ranks:
    """Connected processes; use it as a context manager.

    A function that they run must be importable, and its arguments and results must be picklable.

    gloo, which connects the ranks, sometimes crashes on a busy machine while a divided model trains ("double
    free or corruption", about once in 5,000 windows with torch 2.13). So if a process dies by a signal, the
    function runs once more, in new processes, and a warning says so.
    """

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(MOST):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, theirs, f"{self._folder.name}/rendezvous"), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `function(group, *arguments)` on the first `size` ranks.

        Raises:
            Died: a process died by a signal, and one did so again in a second attempt.
            RuntimeError: the function failed on one of them.
        """
        try:
            return self._run_once(size, function, *arguments)
        except Died as died:
            warnings.warn(f"{died}; trying again", stacklevel=2)
        return self._run_once(size, function, *arguments)

    def _run_once(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for end in self._ends[:size]:
            end.send((size, function, arguments))
        results, failures, died = [], [], []
        for rank, end in enumerate(self._ends[:size]):
            if not end.poll(_SECONDS):
                failures.append(f"rank {rank} does not answer")
                continue
            try:
                is_fine, result = end.recv()
            except EOFError:
                self._processes[rank].join()
                died.append(f"rank {rank} died with exit code {self._processes[rank].exitcode}")
            else:
                (results if is_fine else failures).append(result)
        if died:
            by_signal = all((process.exitcode or 0) <= 0 for process in self._processes)
            self._end()
            self._start()
            raise (Died if by_signal else RuntimeError)("\n".join(died))
        if failures:
            raise RuntimeError("\n".join(failures))
        return results


def _serve(rank: int, requests: Connection, file: str) -> None:
    faulthandler.enable()  # a crash in a library shows where each thread was
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from workers.training.distributed.group import ALONE, Group, ProcessGroup

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=MOST)
    timeout = timedelta(seconds=_SECONDS)
    groups: dict[int, Group] = {1: ALONE}
    for size in range(2, MOST + 1):
        pair = [dist.new_group(list(range(size)), timeout=timeout, backend="gloo") for _ in range(2)]
        if rank < size:
            groups[size] = ProcessGroup(rank, size, *pair)
    while True:
        size, function, arguments = requests.recv()
        try:
            requests.send((True, function(groups[size], *arguments)))
        except Exception:
            requests.send((False, traceback.format_exc()))
