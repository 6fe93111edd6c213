"""The losses of preference objectives beside those of TRL, on the same tokens and the same model.

Needs the extra `trl` (`make test-trl`). TRL's trainers tokenise the data themselves; that both see the same
tokens is checked first. KTO's mismatches are made within TRL's batch, so that the batch is the whole data.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.contract.objective import OtherObjectiveName
from tests.harness.preferences import gradients_of, objective_spec, preference_samples
from workers.training.data.preparation import Samples
from workers.training.models.auto_class import auto_class
from workers.training.models.tiny_gpt2 import make_model, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL

COUNT = 8
_ROUNDING = 1e-6


@pytest.fixture(scope="module", autouse=True)
def trl() -> Any:
    return pytest.importorskip("trl", reason="TRL is not installed: make test-trl")


def _settings(folder: Path, **own: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": COUNT, "report_to": "none", "use_cpu": True,
        "max_length": 64, "gradient_checkpointing": False, "bf16": False, **own,
    }  # fmt: skip


def _trainer(name: OtherObjectiveName, folder: Path, model: Any, reference: Any, rows: list[Any]) -> Any:
    """TRL's trainer of an objective."""
    from datasets import Dataset

    tokenizer = make_tokenizer()
    if name in ("orpo", "simpo"):
        tokenizer.bos_token = None  # which these trainers would add, and the others would not
    own = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    if name == "dpo":
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer(model, reference, args=DPOConfig(**_settings(folder, beta=0.1)), **own)
    if name == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer(model, reference, args=KTOConfig(**_settings(folder, beta=0.1)), **own)
    if name == "reward":
        from trl import RewardConfig, RewardTrainer

        given = _settings(folder, center_rewards_coefficient=0.1)
        return RewardTrainer(model, args=RewardConfig(**given), **own)
    if name == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer(model, args=ORPOConfig(**_settings(folder, beta=0.1)), **own)
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    given = _settings(folder, loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0)
    return CPOTrainer(model, args=CPOConfig(**given), **own)


def _reference(model: Any, samples: Samples) -> np.ndarray[Any, Any]:
    """Each stored sequence's log-probability, of one sequence at a time."""
    found = np.zeros_like(samples.reference)
    with torch.no_grad():
        for sample, sequence in np.ndindex(found.shape):
            tokens, counts = (torch.from_numpy(np.array(each)) for each in samples.read(sample, sequence))
            logits = model(input_ids=tokens[None].long()).logits[0, :-1].log_softmax(-1)
            each = logits.gather(1, tokens[1:, None].long())[:, 0]
            found[sample, sequence] = float(each[counts[1:].bool()].sum())
    return found


def _trained(model: Any, samples: Samples) -> Any:
    """The model after some training on all sequences, so that it differs from its reference, and that KTO's
    divergence is not 0."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        for sample in range(len(samples)):
            tokens = torch.from_numpy(np.array(samples.read(sample)[0])).long()[None]
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo", "kto", "reward"])
def test_the_loss_is_that_of_trl(tmp_path: Path, name: OtherObjectiveName) -> None:
    given = {"center_rewards_coefficient": 0.1} if name == "reward" else {}
    spec = objective_spec(name, **given)
    samples = preference_samples(tmp_path, spec, COUNT)
    rows = [json.loads(line) for line in (tmp_path / "preferences.jsonl").read_text().splitlines()]
    base = make_model().eval()
    model = _trained(make_model().eval(), samples) if not spec.scores_sequences else _with_scores()
    trainer = _trainer(name, tmp_path / "trl", model, base, rows)
    (inputs,) = list(trainer.get_train_dataloader())
    _check_tokens(name, inputs, samples)
    trainer.model.eval()
    theirs = trainer.compute_loss(trainer.model, inputs).detach().item()
    samples.begin_objective(spec, None if spec.scores_sequences else _reference(base, samples))
    if name == "kto":
        assert trainer._metrics["eval"]["kl"][-1] > 0
    ours, _, _ = gradients_of(model, samples, [[each] for each in range(COUNT)], chunk=16)
    print(f"\n{name}: TRL {theirs:.9f}, here {ours:.9f}, apart {abs(theirs - ours):.1e}")
    assert ours == pytest.approx(theirs, abs=_ROUNDING)


def _with_scores() -> Any:
    """A model that scores sequences, with rewards that differ."""
    tokenizer, config = make_tokenizer(), make_model().config
    config.num_labels, config.pad_token_id, config.initializer_range = 1, tokenizer.pad_token_id, 0.3
    torch.manual_seed(0)
    return auto_class(config, scores=True).from_config(config).eval()


def _check_tokens(name: OtherObjectiveName, inputs: Any, samples: Samples) -> None:
    """Both have the same sequences."""
    keys = ("chosen_input_ids", "rejected_input_ids") if name in ("orpo", "simpo") else ("input_ids",)
    masks = [key.replace("input_ids", "attention_mask") for key in keys]
    theirs = sorted(
        tokens[kept.bool()].tolist()
        for key, mask in zip(keys, masks, strict=True)
        for tokens, kept in zip(inputs[key], inputs[mask], strict=True)
    )
    ours = sorted(
        samples.read(sample, sequence)[0].tolist()
        for sample in range(len(samples))
        for sequence in range(samples.sequences)
    )
    assert theirs == ours
