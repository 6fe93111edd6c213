"""What follows from a validation loss."""

from app.contract.spec import EarlyStopping
from workers.training.evaluation import record
from workers.training.state import RunState


def noted(losses: list[float], patience: EarlyStopping | None) -> tuple[RunState, list[bool]]:
    state, better = RunState(), []
    for step, loss in enumerate(losses, start=1):
        state.progress.step = step
        better.append(record(state, loss, patience))
    return state, better


def test_the_lowest_loss_counts_as_best_even_if_the_gain_is_tiny() -> None:
    state, better = noted([5.4705, 5.3285], EarlyStopping(patience=5, min_delta=0.5))
    assert better == [True, True]
    assert (state.evaluations.best_step, state.evaluations.best_loss) == (2, 5.3285)
    assert state.evaluations.without_gain == 1


def test_small_gains_that_add_up_reset_patience() -> None:
    state, _ = noted([5.0, 4.7, 4.4, 4.1], EarlyStopping(patience=3, min_delta=0.5))
    assert not state.progress.stopped_early
    assert state.evaluations.best_step == 4


def test_training_stops_after_patience_evaluations_without_gain() -> None:
    state, _ = noted([5.0, 4.9, 4.8, 4.7], EarlyStopping(patience=3, min_delta=0.5))
    assert state.progress.stopped_early
    assert state.evaluations.best_step == 4
