"""One decision for each window, from everything that happened while it was accumulated."""

from math import inf, nan

import pytest

from workers.training.recovery.decision import Totals, Verdict, WindowOutcome, decide


@pytest.mark.parametrize(
    ("totals", "scale_can_fall", "verdict"),
    [
        (Totals(2.0, 1.0), False, Verdict.APPLY),
        (Totals(2.0, 1.0), True, Verdict.APPLY),
        (Totals(9.0, 1.0), True, Verdict.SKIP_SPIKE),
        (Totals(2.0, inf), True, Verdict.REPLAY_AT_LOWER_LOSS_SCALE),
        (Totals(9.0, inf), True, Verdict.REPLAY_AT_LOWER_LOSS_SCALE),
        (Totals(2.0, nan), False, Verdict.SKIP_NOT_FINITE),
        (Totals(nan, inf), True, Verdict.SKIP_NOT_FINITE),
        (Totals(2.0, 1.0, extra_loss=inf), True, Verdict.SKIP_NOT_FINITE),
    ],
)
def test_a_complete_window_is_applied_replayed_or_skipped(
    totals: Totals, scale_can_fall: bool, verdict: Verdict
) -> None:
    found = decide(WindowOutcome(totals), scale_can_fall=scale_can_fall, accept=lambda loss: loss < 5)
    assert found is verdict


def test_a_stop_takes_precedence_over_out_of_memory_and_that_over_non_finite_values() -> None:
    assert decide(WindowOutcome(interruption_requested=True, out_of_memory_on=(0,))) is Verdict.INTERRUPT
    assert decide(WindowOutcome(Totals(nan, nan), out_of_memory_on=(0,))) is Verdict.REPLAY_IN_LESS_MEMORY
