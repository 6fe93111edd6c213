from workers.training.recovery.guards import spike_filter


def test_a_spike_is_detected_by_its_z_score() -> None:
    losses = [2.0, 2.2] * 10  # mean 2.1, deviation 0.1
    assert spike_filter(losses, 3.0)(2.39)
    assert not spike_filter(losses, 3.0)(2.41)
    assert spike_filter(losses, 3.0)(0.5)
    assert spike_filter(losses[:9], 3.0)(100.0)


def test_rounding_of_a_constant_loss_is_no_spike() -> None:
    assert spike_filter([2.5] * 12, 6.0)(2.5 + 1e-12)
    assert spike_filter([7.310260106548372] * 26, 6.0)(7.310260106548372)
    assert not spike_filter([2.5] * 12, 6.0)(2.6)
