"""Lines of a trainer's log."""

from app.contract.reports import LogLine


def line(step: int, attempt: int = 1, loss: float = 1.0) -> LogLine:
    return LogLine(
        attempt=attempt, step=step, micro_step=step * 2, batch_idx=0, epoch=0, samples=8, loss=loss,
        loss_ema=loss, gradient_accumulation_steps=2,
        effective_batch_size=8, physical_batch_size=4, learning_rate=0.1,
        grad_norm=1.0, tokens=80, input_tokens=90, padded_tokens=100, tokens_per_second=1.0, memory_gb=1.0,
        peak_gb=2.0, noise_scale=None, skipped=0, time=0.0, data_seconds=0.1, forward_backward_seconds=0.2,
        optimizer_seconds=0.3,
    )  # fmt: skip
