"""`python -m tests.harness.slow_rank RUN_DIR SECONDS`: one rank of a run, which waits in each micro-batch.

The environment names the rank, as for `python -m workers.training`.
"""

import sys
import time
from typing import Any

from workers.training.__main__ import main
from workers.training.replica import Replica


def slow_down(seconds: float) -> None:
    """Makes each micro-batch take at least so long."""
    honest = Replica.add

    def slow(self: Replica, batch: Any) -> None:
        honest(self, batch)
        time.sleep(seconds)

    Replica.add = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(float(sys.argv.pop()))
    sys.exit(main())
