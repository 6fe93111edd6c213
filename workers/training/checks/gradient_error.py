"""How much the gradient of a window differs if it is computed in another way."""

from collections.abc import Callable
from math import isfinite, sqrt
from typing import TypeVar

from workers.training.window import Window

Way = TypeVar("Way")


def gradient_error(window: Window, accumulate: Callable[[Way], None], found: Way, reference: Way) -> float:
    """Compares the gradients of one window that are computed in two ways: |found - reference| / |reference|
    over all parameters. Holds one gradient on the host.

    Args:
        accumulate: opens the window and adds all micro-batches in one of the ways, without any randomness.
    """
    accumulate(reference)
    held = {p: gradient.detach().cpu().clone() for p, gradient in window.gradient().items()}
    window.abandon()
    accumulate(found)
    difference = norm = 0.0
    for parameter, gradient in window.gradient().items():
        one = held.pop(parameter).double()
        difference += float((gradient.detach().cpu().double() - one).square().sum())
        norm += float(one.square().sum())
    difference, norm = window.sum_of_parts([difference, norm])
    window.abandon()
    return float("inf") if held or not isfinite(norm) else sqrt(difference / norm) if norm else 0.0
