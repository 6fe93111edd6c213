"""Four processes that stay connected, and run a function on the first few of them as ranks."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Self

MOST = 4

_SECONDS = 240.0


class Ranks:
    """Connected processes; use it as a context manager.

    A function that they run must be importable, and its arguments and results must be picklable.
    """

    def __enter__(self) -> Self:
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
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `function(group, *arguments)` on the first `size` ranks.

        Raises:
            RuntimeError: it failed on one of them.
        """
        for end in self._ends[:size]:
            end.send((size, function, arguments))
        results, failures = [], []
        for end in self._ends[:size]:
            if not end.poll(_SECONDS):
                raise RuntimeError("a rank does not answer")
            is_fine, result = end.recv()
            (results if is_fine else failures).append(result)
        if failures:
            raise RuntimeError("\n".join(failures))
        return results


def _serve(rank: int, requests: Connection, file: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from workers.training.distributed.group import ALONE, ProcessGroup

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=MOST)
    timeout = timedelta(seconds=_SECONDS)
    pairs = {
        size: tuple(dist.new_group(list(range(size)), timeout=timeout, backend="gloo") for _ in range(2))
        for size in range(2, MOST + 1)
    }
    while True:
        size, function, arguments = requests.recv()
        group = ALONE if size == 1 else ProcessGroup(rank, size, *pairs[size])
        try:
            requests.send((True, function(group, *arguments)))
        except Exception:
            requests.send((False, traceback.format_exc()))
