"""The loss: the sum of the target tokens' cross-entropies, to be divided by the window's count once."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from workers.training.batches import IGNORED, MicroBatch


def loss_sum(model: Any, batch: MicroBatch) -> Tensor:
    """Sum over the batch's target tokens of -log p(target), in nats: a scalar, at least in fp32.

    `model` maps (rows, sequence) ids to logits of shape (rows, sequence, vocabulary).
    """
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
