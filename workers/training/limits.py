"""What a trainer may take of its machine, beside the memory that its plan allows it."""

import resource

OPEN_FILES = 4096
"""Many times what a trainer opens: shards, samples, checkpoints."""


def limit() -> None:
    """For this process and those that it starts.

    No core dump: it would hold training text and weights, outside of the data folder. Files open at once are
    limited, so that a leak of them ends the job and not the machine's others.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
