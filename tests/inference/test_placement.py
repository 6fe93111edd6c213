"""How long it takes to find a place for a model, since all answers wait meanwhile."""

import time
from types import SimpleNamespace
from typing import Any

from app.contract.model_reference import ModelReference
from app.planning.devices import GIB, Device
from app.settings import Settings
from tests.harness.specs import make_spec
from workers.inference import placement
from workers.inference.placement import Placement

GPUS = [Device(number, "H100", 80 * GIB, "cuda") for number in range(8)]


def placed(settings: Settings, take: Any, times: int) -> list[Any]:
    slots: Any = SimpleNamespace(usable=lambda: GPUS)
    locks: Any = SimpleNamespace(take=take)
    finder = Placement(settings, locks, slots, lambda: False)
    model = ModelReference(name="m", source="local", architecture=make_spec().model.architecture)
    return [finder.place(model) for _ in range(times)]


def test_gpus_that_train_do_not_delay_answers(settings: Settings) -> None:
    began = time.monotonic()
    found = placed(settings, lambda _: None, 40)
    assert time.monotonic() - began < 5 * placement._LOOKING_SECONDS + 0.5
    assert all(place.device is None for place in found)


def test_a_gpu_that_a_worker_looks_at_for_a_moment_is_waited_for(settings: Settings) -> None:
    answers = iter([None, None])
    [place] = placed(settings, lambda device: next(answers, 7), 1)
    assert (place.device, place.lock) == (GPUS[0], 7)
