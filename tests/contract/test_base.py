"""The models, which pydantic builds at their first use."""

import subprocess
import sys

_FROM_THREADS = """
import random
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import app.main
from app.contract.base import Frozen, RequestPart, ResponseModel
from pydantic import TypeAdapter, ValidationError

warnings.simplefilter("error")
sys.setswitchinterval(1e-6)


def below(base):
    return [model for each in base.__subclasses__() for model in (each, *below(each))]


models = [model for base in (Frozen, RequestPart, ResponseModel) for model in below(base)]
print(len(models), sum(model.__pydantic_complete__ for model in models))
together = threading.Barrier(8)


def use_all(number):
    mine = random.Random(number // 2).sample(models, len(models))  # two threads have the same order
    together.wait()
    for model in mine:
        if number % 2:
            TypeAdapter(model).json_schema()
        try:
            model.model_validate({})
        except ValidationError:
            pass


with ThreadPoolExecutor(8) as threads:
    list(threads.map(use_all, range(8)))
print(sum(model.__pydantic_complete__ for model in models))
"""


def test_threads_may_use_all_models_for_the_first_time_at_once() -> None:
    """None is built when the service starts, and each can be built, without a warning."""
    run = subprocess.run([sys.executable, "-c", _FROM_THREADS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    models, built_at_start, built = map(int, run.stdout.split())
    assert models > 180
    assert built_at_start < 20
    assert built == models
