"""What follows from a validation loss."""

from app.contract.spec import EarlyStopping
from workers.training.checkpoint import TrainingState
from workers.training.evaluation import note


def noted(losses: list[float], patience: EarlyStopping | None) -> tuple[TrainingState, list[bool]]:
    state, better = TrainingState(), []
    for step, loss in enumerate(losses, start=1):
        state.step = step
        better.append(note(state, loss, patience))
    return state, better


def test_the_lowest_loss_is_kept_however_little_lower_it_is() -> None:
    state, better = noted([5.4705, 5.3285], EarlyStopping(patience=5, min_delta=0.5))
    assert better == [True, True]
    assert (state.best_step, state.best_loss) == (2, 5.3285)
    assert state.evaluations_without_gain == 1


def test_small_gains_that_add_up_renew_patience() -> None:
    state, _ = noted([5.0, 4.7, 4.4, 4.1], EarlyStopping(patience=3, min_delta=0.5))
    assert not state.stopped_early
    assert state.best_step == 4


def test_patience_ends_without_gain() -> None:
    state, _ = noted([5.0, 4.9, 4.8, 4.7], EarlyStopping(patience=3, min_delta=0.5))
    assert state.stopped_early
    assert state.best_step == 4
