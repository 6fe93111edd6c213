"""Measures what a process holds on a GPU besides its tensors: CUDA's context, and the libraries' workspaces.

It depends on the GPU, on the driver and on the build of torch, and is several hundred MiB. Free memory is
read in one process while another one starts to use the GPU, so that neither nvidia-smi nor process ids, which
a container hides, are needed.

`python -m workers.cuda_context` is the process that measures, on its first GPU; it prints the bytes.
"""

import subprocess
import sys
from collections.abc import Sequence

import structlog

from app import PACKAGE_PREFIX, PACKAGES_FOLDER
from app.planning.devices import MIB, Device
from workers.trainer_process import device_environment

log = structlog.get_logger("accrue.worker")

_SECONDS = 120.0
_LEAST, _MOST = 64 * MIB, 4096 * MIB
"""Other results are not those of a context: another process took or released memory meanwhile."""
_TOLERANCE = 0.05
"""The largest relative difference between two measurements."""

_HOLD = "--hold"
"""The argument of the process whose context is measured."""


class ContextSizes:
    """The sizes of contexts by the names of GPUs."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, device: Device) -> int | None:
        """The size of a context on this device, in bytes; None if it is not known."""
        return self._known.get(device.name)

    def measure(self, devices: Sequence[Device]) -> None:
        """Measures the context on each kind of GPU whose size is not known yet; to be called while no job
        uses these GPUs."""
        gpus = {each.name: each for each in devices if each.kind == "cuda"}
        for name, device in gpus.items():
            found = None if name in self._known else measured(device)
            if found is not None:
                log.info("CUDA context measured", device=name, bytes=found)
                self._known[name] = found


def measured(device: Device) -> int | None:
    """The size of a context on a GPU in bytes, or None if it could not be measured."""
    command = [sys.executable, "-m", f"{PACKAGE_PREFIX}workers.cuda_context"]
    try:
        output = subprocess.run(
            command,
            env=device_environment([device]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
            cwd=PACKAGES_FOLDER,
        ).stdout
        return agreed([int(line) for line in output.split()])
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def agreed(sizes: Sequence[int]) -> int | None:
    """The larger of several measurements, if they are plausible and agree."""
    if len(sizes) < 2 or min(sizes) < _LEAST or max(sizes) > _MOST:
        return None
    return max(sizes) if max(sizes) <= (1 + _TOLERANCE) * min(sizes) else None


def main() -> None:
    """Prints two measurements; with --hold, uses the GPU until its standard input ends."""
    import torch

    square = torch.ones(256, 256, device="cuda")
    (square @ square).sum().item()
    (square.bfloat16() @ square.bfloat16()).sum().item()
    if _HOLD in sys.argv:
        print(torch.cuda.memory_reserved(), flush=True)
        sys.stdin.read()
        return
    for _ in range(2):
        before = torch.cuda.mem_get_info()[0]
        with subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE_PREFIX}workers.cuda_context", _HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            reserved = int(child.stdout.readline())
            print(before - torch.cuda.mem_get_info()[0] - reserved, flush=True)
            child.stdin.close()


if __name__ == "__main__":
    main()
