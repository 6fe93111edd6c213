"""Tokens are chosen as transformers' own processors and warpers would choose them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from app.contract.inference import SamplingOptions
from workers.inference.sampling import Sampling, SamplingDefaults

PLAIN = SamplingDefaults()
LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3


def sampling(**given: object) -> Sampling:
    return PLAIN.sampling(SamplingOptions.model_validate(given))


def shares(own: Sampling, draws: int = 4000) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    drawn = [own.choose(LOGITS, [1, 2], [3], source) for _ in range(draws)]
    return torch.bincount(torch.tensor(drawn), minlength=50) / draws


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0.7}, TemperatureLogitsWarper(0.7)),
        ({"top_k": 5}, TopKLogitsWarper(5)),
        ({"top_p": 0.6}, TopPLogitsWarper(0.6)),
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
        ({"repetition_penalty": 1.5}, RepetitionPenaltyLogitsProcessor(1.5)),
    ],
)
def test_shares_are_those_of_transformers(given: dict[str, float], expected: object) -> None:
    seen = torch.tensor([[1, 2, 3]])
    probabilities = torch.softmax(expected(seen, LOGITS[None].clone())[0], dim=-1)  # type: ignore[operator]
    found = shares(sampling(**given))
    assert found[probabilities == 0].sum() == 0
    assert (found - probabilities).abs().max() < 0.04


def test_without_temperature_the_most_probable_token_is_chosen() -> None:
    own = sampling(temperature=0)
    assert own.is_plain
    assert own.choose(LOGITS, [], [], torch.Generator()) == int(LOGITS.argmax())


def test_biases_and_penalties_apply_without_temperature() -> None:
    best = int(LOGITS.argmax())
    for given in ({"logit_bias": {best: -100}}, {"frequency_penalty": 2}, {"presence_penalty": 2}):
        own = sampling(temperature=0, **given)
        assert not own.is_plain
        assert own.choose(LOGITS, [], [best] * 20, torch.Generator()) != best or "presence_penalty" in given
    assert sampling(temperature=0, logit_bias={7: 100}).choose(LOGITS, [], [], torch.Generator()) == 7
    assert sampling(temperature=0, logit_bias={9999: 100}).choose(LOGITS, [], [], torch.Generator()) == best


def test_penalties_are_subtracted_from_logits() -> None:
    own = sampling(temperature=0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.tensor([1.0, 0.2, 0.0])
    assert own.choose(logits, [], [0], torch.Generator()) == 0  # 1.0 - 0.75 = 0.25
    assert own.choose(logits, [], [0, 0], torch.Generator()) == 1  # 1.0 - 1.0 = 0.0
    assert own.choose(logits, [0, 0], [], torch.Generator()) == 0  # those of the prompt do not count


def test_the_same_seed_draws_the_same_tokens() -> None:
    own = sampling(temperature=1)
    first, second = (
        [own.choose(LOGITS, [], [], source) for _ in range(20)]
        for source in (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))
    )
    assert first == second


def test_defaults_come_from_the_model(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": "no number", "eos_token_id": 3})
    )
    defaults = SamplingDefaults.of_folder(tmp_path)
    found = defaults.sampling(SamplingOptions())
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 1.0)
    assert defaults.sampling(SamplingOptions(temperature=0, top_k=0)).temperature == 0
    assert SamplingDefaults.of_folder(tmp_path / "missing").sampling(SamplingOptions()).temperature == 1


@pytest.mark.parametrize(
    "given",
    [
        {"top_p": 1e-320},
        {"top_p": 1e-300, "min_p": 1e-320},
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e-40},
        {"temperature": 1e-4, "repetition_penalty": 1e-36},
        {"repetition_penalty": 1e300, "temperature": 2.0},
    ],
)
def test_extreme_options_still_choose_a_token(given: dict[str, float]) -> None:
    token = sampling(**{"temperature": 1.0, **given}).choose(LOGITS, [1, 2], [3], torch.Generator())
    assert 0 <= token < len(LOGITS)


def test_a_tiny_top_p_leaves_the_most_probable_token() -> None:
    own = sampling(temperature=1.0, top_p=1e-320)
    assert own.choose(LOGITS, [], [], torch.Generator()) == int(LOGITS.argmax())


def test_extreme_defaults_of_a_model_still_choose_a_token() -> None:
    defaults = SamplingDefaults({"top_p": -1.0, "min_p": 5.0, "repetition_penalty": -1e300})
    own = defaults.sampling(SamplingOptions(temperature=1.0))
    assert 0 <= own.choose(LOGITS, [1], [2], torch.Generator()) < len(LOGITS)
