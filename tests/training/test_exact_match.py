"""Exact matches are those of greedy decoding, although no text is generated."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from app.contract.spec import ValidationSpec
from tests.harness.runs import create_run, events_of, small_data, write_chats
from tests.harness.specs import make_optimizer, make_spec
from tests.harness.training import run_to_end
from workers.run_directory import RunDirectory
from workers.training.data.batch_loader import lay_out
from workers.training.data.preparation import Samples
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A model that knows some of its samples by heart."""
    folder = tmp_path_factory.mktemp("run")
    write_chats(folder / "data.jsonl")
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.5)
    spec = make_spec(
        data=small_data(format="messages", examples=40, validation=share),
        max_steps=60,
        optimizer=make_optimizer("adamw", 5e-3),
    )
    run = create_run(folder / "run", spec)
    run_to_end(run)
    return run


def generated_exactly(run: RunDirectory, samples: Samples) -> list[bool]:
    """Whether greedy decoding from a sample's prompt gives its answer, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(run.model).eval()
    found = []
    for number in range(len(samples)):
        tokens, counts = (torch.from_numpy(np.array(each)) for each in samples.read(number))
        first, last = int(counts.int().argmax()), int(counts.nonzero()[-1])
        options = GenerationConfig(max_new_tokens=last + 1 - first, do_sample=False, eos_token_id=-1)
        given = tokens[None, :first].long()
        made = model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), generation_config=options
        )[0, first:]
        found.append(made.tolist() == tokens[first : last + 1].tolist())
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_every_target_is_the_most_probable_where_greedy_decoding_gives_the_answer(
    learned: RunDirectory, packed: bool
) -> None:
    samples = Samples(learned.data)
    expected = generated_exactly(learned, samples)
    assert 0 < sum(expected) < len(expected), "some, so that the comparison tells something"
    loss = TokenLoss(AutoModelForCausalLM.from_pretrained(learned.model).eval())
    layout = BatchLayout(pad_id=0, packed=packed)
    with torch.no_grad():
        alone = [
            float(loss(lay_out(samples, [number], layout), evaluates=True).exact or 0)
            for number in range(len(samples))
        ]
        together = loss(lay_out(samples, range(len(samples)), layout), evaluates=True).exact
    assert alone == [float(each) for each in expected]
    assert together is not None
    assert float(together) == sum(expected)


def test_evaluations_report_the_share(learned: RunDirectory) -> None:
    held = generated_exactly(learned, Samples(learned.data / "validation"))
    (evaluation,) = [event for event in events_of(learned) if event["type"] == "evaluation"]
    assert evaluation["data"]["exact_match"] == pytest.approx(sum(held) / len(held))
