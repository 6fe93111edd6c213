"""How many positions' logits the loss computes at a time, in the trainer and in the simulation."""

from typing import Literal

import pytest

from app.contract.loss_chunks import rows_of_chunk
from app.contract.memory_profile import Recipe
from tests.benchmarks.accuracy import FAMILIES
from tests.harness.small_models import VOCABULARY, make_model
from workers.profiling.depth import Depth
from workers.profiling.simulate import Simulation
from workers.training.models.head import head_of


@pytest.mark.parametrize(
    ("vocabulary", "cpu", "cuda"),
    [(260, 32263, 2048), (32_000, 262, 2048), (128_256, 128, 1046), (262_144, 128, 512), (2**21, 128, 128)],
)
def test_a_gpu_takes_larger_chunks(vocabulary: int, cpu: int, cuda: int) -> None:
    assert rows_of_chunk(vocabulary, "cpu") == cpu
    assert rows_of_chunk(vocabulary, "cuda") == cuda


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_simulation_takes_the_chunks_of_the_device_that_it_predicts_for(
    device: Literal["cpu", "cuda"],
) -> None:
    config = {**FAMILIES["llama"], "vocab_size": 32_000}
    layers = config["num_hidden_layers"]
    simulation = Simulation(config, Recipe(device=device, precision="fp32"), Depth(layers, layers, 0))
    head = simulation._token_loss.head
    assert head is not None
    assert head.rows == rows_of_chunk(32_000, device)


def test_the_trainer_takes_the_chunks_of_its_weights_device() -> None:
    head = head_of(make_model("llama"))
    assert head is not None
    assert head.rows == rows_of_chunk(VOCABULARY, "cpu")
