"""Predicted durations: which tokens per sample they are based on."""

from dataclasses import replace
from typing import Any

import pytest

from app.contract.preview import Lengths
from app.planning.devices import GIB, Device
from app.statistics.performance import Speed
from app.statistics.work_done import DeviceHistory
from app.submissions.durations import predict
from tests.harness.specs import make_spec, plan_by_formula

CPU = Device("cpu", "CPU", 8 * GIB, "cpu")
SPEED = Speed("ftjob-1", samples_per_second=10.0, tokens_per_sample=20.0, is_of_same_file=True)
LENGTHS = Lengths(
    examples=100, shortest=1, median=200, mean=200, longest=400, over_max_length=0, without_targets=0,
    kept=200.0, target_share=1.0, histogram=(),
)  # fmt: skip


class Inputs:
    def tokens_per_sample(self, spec: Any) -> None:
        return None

    def work_done(self, device: Any, precision: Any) -> DeviceHistory:
        return DeviceHistory(done=(), overhead_seconds=0.0)


@pytest.mark.parametrize(
    ("speed", "lengths", "tokens", "slower"),
    [
        (SPEED, LENGTHS, 20, 1),
        (SPEED, None, 20, 1),
        (replace(SPEED, is_of_same_file=False), LENGTHS, 200, 10),
        (replace(SPEED, is_of_same_file=False), None, 20, 1),
    ],
)
def test_another_file_s_speed_is_scaled_to_this_one_s_lengths(
    speed: Speed, lengths: Lengths | None, tokens: int, slower: float
) -> None:
    spec = make_spec(epochs=1, max_steps=None)
    inputs: Any = Inputs()
    found = predict(spec, plan_by_formula(spec, [CPU], predicted=True), CPU, 1000, speed, lengths, inputs)
    assert found is not None
    samples = spec.data.examples - spec.data.held_out()
    assert found.tokens == samples * tokens
    assert found.duration.expected == pytest.approx(samples / 10 * slower)
