"""What the planner suggests instead holds when it is requested."""

from dataclasses import replace

import pytest

from app.contract.memory_profile import Recipe
from app.contract.plan import Alternative
from app.planning.architectures import named
from app.planning.changes import changes
from app.planning.defaults import memory_limits
from app.planning.devices import GIB, Device
from app.planning.planner import PLANNED, PlannerEvidence, Question, Solution, alternatives, by_formula, solve

BF16 = Recipe(device="cuda", precision="bf16")


def known_of(name: str) -> PlannerEvidence:
    architecture = named(name)
    assert architecture is not None
    return by_formula(architecture)


def gpus(*gib: int) -> list[Device]:
    return [Device(number, "GPU", each * GIB, "cuda") for number, each in enumerate(gib)]


def question(recipe: Recipe, devices: list[Device], batch: int, sequence: int = 1024) -> Question:
    limits = memory_limits(0.9, None, None)
    split = PLANNED.model_copy(update={"devices": len(devices)})
    return Question(recipe, sequence, devices, limits, batch, split=split, may_shard=True)


def applied(change: str, asked: Question) -> Question | None:
    """The question with an alternative's change; None for a number of devices."""
    field, _, value = change.partition(": ")
    if field == "micro_batch_size":
        split = asked.split.model_copy(update={"micro_batch_size": int(value)})
        return replace(asked, split=split)
    found = [each for each in changes(asked.recipe, asked.sequence) if each.description == change]
    return replace(asked, recipe=found[0].recipe, sequence=found[0].sequence) if found else None


def agree(alternative: Alternative, solution: Solution) -> bool:
    return (
        alternative.fits,
        alternative.micro_batch_size,
        alternative.accumulation_steps,
        alternative.peak_process_bytes,
    ) == (
        solution.fits,
        solution.micro_batch,
        solution.steps,
        solution.tightest.memory.peak_process_bytes,
    )


@pytest.mark.parametrize(
    ("name", "devices", "batch"),
    [
        ("meta-llama/Llama-3.1-8B", gpus(24, 24, 24, 24), 32),  # nothing fits
        ("meta-llama/Llama-3.1-8B", gpus(80, 80, 80, 80), 64),
        ("Qwen/Qwen3-0.6B", gpus(11, 141), 30),
        ("Qwen/Qwen3-0.6B", gpus(16, 24, 80), 1000),
        ("gpt2", gpus(24), 20_000),
    ],
)
@pytest.mark.parametrize("recipe", [BF16, BF16.model_copy(update={"gradient_checkpointing": True})])
def test_alternatives_hold_when_they_are_requested(
    name: str, devices: list[Device], batch: int, recipe: Recipe
) -> None:
    known, asked = known_of(name), question(recipe, devices, batch)
    found = alternatives(solve(asked, known), known)
    assert found
    for alternative in found:
        changed = applied(alternative.change, asked)
        if changed is not None:
            assert agree(alternative, solve(changed, known)), alternative.change


@pytest.mark.parametrize(
    ("name", "gib", "batch", "size"),
    [
        ("gpt2", (16, 80, 6, 8), 6, 2),
        ("gpt2", (24, 11, 80), 177, 13),
        ("Qwen/Qwen3-0.6B", (24, 40), 9, 3),
    ],
)
def test_a_smaller_micro_batch_fits_the_smallest_device(
    name: str, gib: tuple[int, ...], batch: int, size: int
) -> None:
    """It is no smaller than that device needs, even if its part of the batch has a smaller remainder."""
    known, asked = known_of(name), question(BF16, gpus(*gib), batch, 512)
    found = alternatives(solve(asked, known), known)[0]
    assert found.change.startswith("micro_batch_size")
    assert found.fits
    assert found.micro_batch_size >= size


def test_no_micro_batch_is_suggested_that_a_request_may_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.planning.planner.MAX_MICRO_BATCH", 3)
    known = known_of("gpt2")
    found = alternatives(solve(question(BF16, gpus(80), 64), known), known)[0]
    assert found.change == "micro_batch_size: 3"


def test_what_does_not_fit_is_sharded_in_alternatives_too() -> None:
    known = known_of("meta-llama/Llama-3.1-8B")
    solution = solve(question(BF16, gpus(24, 24, 24, 24), 32), known)
    assert not solution.fits
    assert solution.is_sharded
    least = {each.change: each.peak_process_bytes for each in alternatives(solution, known)}
    checkpointed = least["gradient_checkpointing: true"]
    assert checkpointed < solution.tightest.memory.peak_process_bytes
