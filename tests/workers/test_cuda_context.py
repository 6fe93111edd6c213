"""The size of a CUDA context, as a process without a GPU can check it."""

import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.contract.memory_profile import Recipe
from app.devices import gpus
from app.planning.devices import GIB, MIB, Device
from app.planning.estimate import ByFormula
from app.planning.recipes import make_recipe
from tests.harness.specs import make_spec
from workers import cuda_context
from workers.cuda_context import ContextSizes, agreed, measured
from workers.slots import Slots

H100 = Device(0, "H100", 80 * GIB, "cuda", True, 9.0, "GPU-1")


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([500 * MIB, 510 * MIB], 510 * MIB),
        ([500 * MIB, 600 * MIB], None),  # another process took memory
        ([MIB, MIB], None),
        ([-500 * MIB, -500 * MIB], None),
        ([5000 * MIB, 5000 * MIB], None),
        ([500 * MIB], None),
        ([], None),
    ],
)
def test_measurements_count_only_if_they_agree(sizes: list[int], found: int | None) -> None:
    assert agreed(sizes) == found


def test_without_a_gpu_nothing_is_measured() -> None:
    assert measured(H100) is None


def test_each_kind_of_gpu_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(device: Device) -> int | None:
        asked.append(device.name)
        return 600 * MIB if device.name == "H100" else None

    monkeypatch.setattr(cuda_context, "measured", measured)
    others = [
        Device(1, "H100", 80 * GIB, "cuda"),
        Device(2, "T4", 16 * GIB, "cuda"),
        Device("cpu", "CPU", GIB, "cpu"),
    ]
    sizes = ContextSizes()
    for _ in range(2):
        sizes.measure([H100, *others])
    assert sorted(asked) == ["H100", "T4", "T4"]  # which failed, and is tried again
    assert [sizes.of(each) for each in (H100, *others)] == [600 * MIB, 600 * MIB, None, None]


def test_the_measurement_subtracts_what_the_allocator_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The process that measures, with a child that says it holds 2 MiB, and a GPU whose free memory falls."""
    free = iter([80 * GIB, 80 * GIB - 502 * MIB, 80 * GIB, 80 * GIB - 503 * MIB])
    number = SimpleNamespace(item=lambda: 0.0)

    class Square:
        def __matmul__(self, other: Any) -> Any:
            return self

        def sum(self) -> Any:
            return number

        def bfloat16(self) -> Any:
            return self

    cuda = SimpleNamespace(mem_get_info=lambda: (next(free), 80 * GIB), memory_reserved=lambda: 2 * MIB)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(ones=lambda *_, **__: Square(), cuda=cuda))
    child = tmp_path / "child"
    child.write_text(f"#!/bin/sh\necho {2 * MIB}\ncat > /dev/null\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setattr(sys, "argv", ["cuda_context"])
    cuda_context.main()
    assert [int(line) for line in capsys.readouterr().out.split()] == [500 * MIB, 501 * MIB]


def test_plans_use_the_measured_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [SimpleNamespace(device=H100, id=0)]
    monkeypatch.setattr(gpus, "detected", lambda: seen)
    monkeypatch.setattr(cuda_context, "measured", lambda _: 700 * MIB)
    slots = Slots(on_cpu=False)
    assert [device.context_bytes for device in slots.available()] == [None]
    slots.measure_contexts()
    [known] = slots.available()
    assert known.context_bytes == 700 * MIB
    assert Device(**asdict(known)) == known
    [planned] = gpus.for_planning([], [known])
    assert planned.context_bytes == 700 * MIB
    spec = make_spec()
    sizes = []
    for device in (H100, planned):
        recipe = make_recipe(device, "bf16", "adamw", spec.method)
        memory = ByFormula(spec.model.architecture, recipe, 128).memory(4)
        sizes.append(memory.peak_process_bytes - memory.peak_reserved_bytes)
    assert sizes == [750 * MIB, 700 * MIB]


def test_profiles_do_not_depend_on_the_context() -> None:
    from app.memory_profiles.profiles import key_of

    architecture = make_spec().model.architecture
    recipe = Recipe(device="cuda", precision="bf16")
    other = recipe.model_copy(update={"context_bytes": 700 * MIB})
    assert key_of(architecture, recipe, 128) == key_of(architecture, other, 128)
