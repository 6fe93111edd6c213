"""The models, which pydantic builds at their first use."""

import subprocess
import sys

_FROM_THREADS = """
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
print(*(model.__name__ for model in models if not model.__pydantic_fields_complete__))
together = threading.Barrier(4)


def use_all(number):
    for model in models:
        together.wait()
        if number == 0:
            TypeAdapter(model).json_schema()
        try:
            model.model_validate({})
        except ValidationError:
            pass


with ThreadPoolExecutor(4) as threads:
    list(threads.map(use_all, range(4)))
print(sum(model.__pydantic_complete__ for model in models))
"""


def test_threads_may_use_each_model_for_the_first_time_at_once() -> None:
    """Few are built when the service starts, and each can be built, without a warning."""
    run = subprocess.run([sys.executable, "-c", _FROM_THREADS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    counts, with_unknown_fields, built = run.stdout.splitlines()
    models, built_at_start = map(int, counts.split())
    assert models > 180
    assert built_at_start < 20
    assert with_unknown_fields == "", "error messages look up the fields of nested models"
    assert int(built) == models
