from workers.training.guards import spike


def test_a_spike_is_told_by_its_z_score() -> None:
    losses = [2.0, 2.2] * 10  # mean 2.1, deviation 0.1
    assert spike(losses, 3.0)(2.39)
    assert not spike(losses, 3.0)(2.41)
    assert spike(losses, 3.0)(0.5)
    assert spike(losses[:9], 3.0)(100.0)
