"""`python -m tests.harness.slow_rank RUN_DIR SECONDS FACTOR [equal] [emulated]`: one slow rank of a run.

Each micro-batch takes FACTOR times as long, and SECONDS more. With `equal`, the ranks' shares never change.
With `emulated`, each token, padding included, takes FACTOR seconds, or as long as it does take if that is
longer: as on a device of its own, which does not compete with others for this machine's processor.
The environment names the rank, as for `python -m workers.training`.
"""

import sys
import time
from pathlib import Path
from typing import Any

from workers.run_directory import RunDirectory
from workers.training.attempt import train
from workers.training.distributed.shares import Shares
from workers.training.replica import Replica


def slow_down(seconds: float, factor: float, *, emulated: bool = False) -> None:
    honest = Replica.add

    def slow(self: Replica, batch: Any) -> None:
        began = time.perf_counter()
        honest(self, batch)
        took = time.perf_counter() - began
        longer = factor * batch.input_ids.numel() - took if emulated else (factor - 1) * took
        time.sleep(max(0.0, seconds + longer))

    Replica.add = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    _, run, *given = sys.argv
    slow_down(float(given[0]), float(given[1]), emulated="emulated" in given)
    if "equal" in given:
        Shares.record_window = lambda *_: None  # type: ignore[method-assign]
    sys.exit(train(RunDirectory(Path(run))))
