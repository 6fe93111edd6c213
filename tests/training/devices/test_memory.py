"""Memory does not grow with the accumulation steps, nor with time, and the vocabulary costs a chunk."""

import json
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from app.contract.plan import TokenBudget
from tests.harness.live_bytes import peak_of
from tests.harness.runs import create_run, small_data
from tests.harness.small_models import Window64, make_model
from tests.harness.specs import make_spec
from tests.harness.training import run_to_end
from workers.training.devices import host_memory
from workers.training.gradients.direct_sums import DirectSums
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout, MicroBatch, collate
from workers.training.window import Clipping, Window


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    assert host_memory.available_in(tmp_path) == inf
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 200\nactive_file 100\n")
    assert host_memory.available_in(tmp_path) == inf
    (tmp_path / "memory.max").write_text("1000\n")
    assert host_memory.available_in(tmp_path) == 500
    (tmp_path / "memory.max").write_text("100\n")
    assert host_memory.available_in(tmp_path) == 0


def test_the_peak_is_the_same_for_2_and_for_64_accumulation_steps(window64: Window64) -> None:
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    window = Window(model.parameters(), optimizer, Clipping(1.0))
    loss = TokenLoss(model)
    batch = window64.batch(list(range(8)))

    def one_window(steps: int) -> None:
        window.open(len(batch.targets) * steps)
        for _ in range(steps):
            window.add(loss(batch).loss_sum)
        assert window.close().applied

    one_window(2)
    peaks = {steps: peak_of(lambda steps=steps: one_window(steps)) for steps in (2, 4, 8, 16, 32, 64)}
    print(f"peak bytes by accumulation steps: {peaks}")
    assert max(peaks.values()) <= 1.001 * min(peaks.values())


@pytest.mark.slow
def test_resident_memory_does_not_grow_over_two_thousand_steps(tmp_path: Path) -> None:
    spec = make_spec(
        data=small_data(max_length=16),
        max_steps=2000,
        effective_batch_size=4,
        save_every=500,
        certificate=True,
    )
    run = create_run(tmp_path / "run", spec, rule=TokenBudget(tokens=32))
    run_to_end(run)
    used = [json.loads(line)["memory_gb"] for line in run.metrics.read_text().splitlines()]
    assert len(used) == 2000
    early, late = sum(used[200:300]) / 100, sum(used[-100:]) / 100
    print(f"resident after 200 steps {early:.4f} GiB, after 2,000 {late:.4f} GiB: {late / early - 1:+.2%}")
    assert late < 1.01 * early


@pytest.mark.thorough
def test_a_chunked_loss_takes_a_third_of_the_memory_with_a_vocabulary_of_128k() -> None:
    vocabulary = 128 * 1024
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=vocabulary, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, vocabulary, (2, 512))
    predicted = torch.cat([torch.arange(511), 512 + torch.arange(511)])
    batch = MicroBatch(ids, predicted, ids.flatten()[predicted + 1], (512, 512))

    def one_pass(loss: TokenLoss) -> None:
        loss(batch).loss_sum.backward()
        model.zero_grad(set_to_none=True)

    peaks = {}
    for name, chunked, smoothing in (("full", False, 0.0), ("torch's", True, 0.0), ("ours", True, 0.1)):
        loss = TokenLoss(model, chunked=chunked, smoothing=smoothing)
        one_pass(loss)
        peaks[name] = peak_of(lambda loss=loss: one_pass(loss))
    print({name: f"{peak / 2**20:.0f} MiB" for name, peak in peaks.items()})
    assert peaks["full"] >= 3 * peaks["torch's"]
    assert peaks["full"] >= 3 * peaks["ours"]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_logits_of_one_chunk_at_a_time_are_in_memory(smoothing: float) -> None:
    """Names of the chunk before kept its buffer beside the next one."""
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=8192, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    loss = TokenLoss(model, smoothing=smoothing)
    head, direct = loss.head, DirectSums(model)
    assert head is not None
    loss.direct, direct.loss_factor = direct, 1.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    chunk = head.rows * 8192 * 4

    def peak(chunks: int) -> int:
        tokens = chunks * head.rows + 1
        batch = collate([(np.ones(tokens, np.int32), np.ones(tokens, np.bool_))], BatchLayout(pad_id=0))
        hidden = torch.zeros(tokens - 1, 16, requires_grad=True)
        return peak_of(lambda: loss._of_hidden(hidden, batch, head))

    assert peak(3) - peak(1) < chunk / 2
