"""How many positions' logits the loss computes at a time, for the trainer and the planner."""

from typing import Literal

_LOGITS = {"cpu": 2**23, "cuda": 2**27}
"""The number of logits of a chunk: 32 MiB in fp32 on a CPU, where a chunk should fit into the cache, and
512 MiB on a GPU."""

_LEAST_ROWS = 128
"""So that the matrix products are efficient."""

_MOST_ROWS_ON_GPU = 2048
"""Each chunk reads the head's weight and adds to its gradient: about 12 bytes for each element, if the
gradient is fp32. The element takes part in 2 operations for each row and product, and an H100 does about 300
in bf16 in the time in which it moves a byte (990 TFLOP/s and 3.35 TB/s in its data sheet). So beyond about
600 rows, its three products (the logits and two gradients) take longer than the traffic; with this many rows,
the traffic takes about a third as long as they do, and more rows would take more memory for little."""


def rows_of_chunk(vocabulary: int, device: Literal["cpu", "cuda"]) -> int:
    """The number of positions whose logits are in memory at the same time.

    Args:
        vocabulary: logits of a position; at least 1.
    """
    rows = max(_LEAST_ROWS, _LOGITS[device] // vocabulary)
    return min(rows, _MOST_ROWS_ON_GPU) if device == "cuda" else rows
