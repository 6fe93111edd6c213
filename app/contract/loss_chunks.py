"""How many positions' logits the loss computes at a time, for the trainer and the planner."""

from typing import Literal

_LOGITS = {"cpu": 2**23, "cuda": 2**27}
"""The number of logits of a chunk: 32 MiB in fp32 on a CPU, where a chunk should fit into the cache, and
512 MiB on a GPU."""

_LEAST_ROWS = 128
"""So that the matrix products are efficient."""

_MOST_ROWS_ON_GPU = 2048
"""Each chunk reads the head's weight and adds to its gradient: about 12 bytes for each element of the weight,
if the gradient is fp32. Each of a chunk's three products (the logits and two gradients) takes 2 operations
for each element and row. In bf16, an H100 does about 300 operations in the time in which it moves one byte
(990 TFLOP/s and 3.35 TB/s in its data sheet), so the products take as long as the traffic at about
12 × 300 / (2 × 3) = 600 rows. With 2,048 rows, the traffic takes about a third of the products' time; still
more rows would need more memory and gain little."""


def rows_of_chunk(vocabulary: int, device: Literal["cpu", "cuda"]) -> int:
    """The number of positions whose logits are in memory at the same time.

    Args:
        vocabulary: logits of a position; at least 1.
    """
    rows = max(_LEAST_ROWS, _LOGITS[device] // vocabulary)
    return min(rows, _MOST_ROWS_ON_GPU) if device == "cuda" else rows
