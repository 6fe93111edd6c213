"""Places where a test can make this process die, stop or fail: off unless ACCRUE_FAIL_POINTS names them.

`ACCRUE_FAIL_POINTS=checkpoint.renamed:kill,supervisor.ingested:error:3` kills the process at the first of
these points, and raises at the second when it is reached for the third time. Uses only the standard library.
"""

import os
import signal
import sys
import time
from collections import Counter

VARIABLE = "ACCRUE_FAIL_POINTS"

_passed: Counter[str] = Counter()


class Injected(OSError):
    """A fault that a test has requested."""


def fail_point(name: str) -> None:
    """Does nothing, unless a test has requested a fault here.

    `kill` ends the process as a power cut would; `stop` halts it until SIGCONT; `hang` sleeps for ever;
    `full` raises as a full disk does, `memory` as PyTorch without memory; `error` raises.
    """
    requested_faults = os.environ.get(VARIABLE)
    if requested_faults is None:
        return
    for each in requested_faults.split(","):
        point, _, rest = each.partition(":")
        what, _, at = rest.partition(":")
        if point != name:
            continue
        _passed[name] += 1
        if _passed[name] == int(at or 1):
            _fail(name, what)


def _fail(name: str, what: str) -> None:
    print(f"fail point {name}: {what}", file=sys.stderr, flush=True)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hang":
        time.sleep(10**9)
    elif what == "memory":
        raise RuntimeError("DefaultCPUAllocator: out of memory (injected)")
    elif what == "full":
        raise Injected(28, "No space left on device")
    else:
        raise Injected(5, f"injected at {name}")
