import pytest

from app.planning.architectures import named
from app.planning.recommendations import Situation, recommend, recommended_batch


@pytest.mark.parametrize(
    ("samples", "batch"), [(None, 32), (1, 1), (20, 20), (1000, 32), (10_000, 100), (10**7, 512)]
)
def test_the_recommended_batch_follows_the_data(samples: int | None, batch: int) -> None:
    assert recommended_batch(samples) == batch


def test_every_recommendation_names_its_evidence() -> None:
    gpt2 = named("gpt2")
    assert gpt2 is not None
    situation = Situation(gpt2, target=64, micro_batch=16, devices=2, device_kind="cuda")
    recommended = recommend(situation)
    assert recommended["micro_batch_size"].value * recommended["accumulation_steps"].value * 2 >= 64
    assert recommended["accumulation_steps"].value == 2
    assert all(item.why for item in recommended.values())
    by_formula = {name for name, item in recommended.items() if item.evidence == "formula"}
    assert by_formula == {"micro_batch_size", "accumulation_steps", "gradient_checkpointing"}
    assert recommended["learning_rate"].evidence == "literature"
    assert recommended["gradient_checkpointing"].value is False
