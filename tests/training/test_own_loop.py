"""An example: `Window` in a custom training loop, with any PyTorch model and any data."""

import torch
from torch import Tensor, nn

from workers.training.window import Clipping, Window


class Reader(nn.Module):
    """A recurrent classifier of every position: nothing that comes from transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.recurrent = nn.GRU(16, 32, batch_first=True)
        self.output = nn.Linear(32, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.output(self.recurrent(self.embedding(tokens))[0])
        return hidden


def test_a_custom_loop_trains_exactly_in_any_split() -> None:
    random = torch.Generator().manual_seed(0)
    batches = [
        [
            torch.randint(0, 20, (1, int(n)), generator=random)
            for n in torch.randint(2, 30, (12,), generator=random)
        ]
        for _ in range(20)
    ]

    def train(micro_batch: int) -> tuple[list[float], Tensor]:
        torch.manual_seed(1)
        model = Reader().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        window = Window(model.parameters(), optimizer, Clipping(1.0))
        losses = []
        for batch in batches:
            parts = [batch[i : i + micro_batch] for i in range(0, len(batch), micro_batch)]
            window.open(denominator=sum(s.shape[1] - 1 for s in batch), micro_batches=len(parts))
            for part in parts:
                total = torch.zeros((), dtype=torch.float64)
                for sample in part:
                    logits = model(sample[:, :-1])
                    total = total + nn.functional.cross_entropy(
                        logits.flatten(0, 1), sample[:, 1:].flatten(), reduction="sum"
                    )
                assert not window.should_update
                window.add(total)
            assert window.should_update
            assert window.accumulation_step == len(parts)
            closed = window.close()
            assert closed.applied
            assert closed.grad_norm > 0
            assert closed.seconds > closed.optimizer_seconds > 0
            assert closed.memory_bytes > 0
            losses.append(closed.loss)
        return losses, torch.cat([p.detach().flatten() for p in model.parameters()])

    whole_losses, whole = train(12)
    assert whole_losses[-1] < whole_losses[0]
    for micro_batch in (1, 5):
        losses, weights = train(micro_batch)
        assert max(abs(a - b) for a, b in zip(losses, whole_losses, strict=True)) < 1e-10
        assert float((weights - whole).norm() / whole.norm()) < 1e-9
