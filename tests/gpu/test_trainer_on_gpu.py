"""The trainer on a GPU: precisions, the chunked loss, gradients on the host, and running out of memory.

Figures that a run should keep go to $OUT/gpu.json where OUT is set.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from app.contract.plan import FixedSize, RankPlan, TokenBudget
from tests.harness.gpu_results import keep
from tests.harness.small_models import CONFIGS, make_model, make_window64
from workers.training.checkpoints.state import LearnedBudget
from workers.training.gradients.gradient_sums import SeparateAccumulator, gradients_for
from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import cut_window
from workers.training.micro_batches.budget import Budget
from workers.training.window import Clipping, Window

CUDA = torch.device("cuda")


def gradient(model: Any, groups: list[list[int]], dtype: torch.dtype | None, **options: Any) -> torch.Tensor:
    data, parameters = make_window64(), list(model.parameters())
    held = gradients_for(parameters, in_fp32=True, host=options.pop("host")) if "host" in options else None
    loss = TokenLoss(model, **options)
    window = Window(parameters, torch.optim.SGD(parameters, lr=0.0), gradients=held)
    window.open(data.targets)
    for group in groups:
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            forward = loss(data.batch(group).to(CUDA))
        window.add(forward.loss_sum)
    sums = window.gradient()
    found = torch.cat([sums[p].double().flatten().cpu() for p in parameters if p in sums])
    window.abandon()
    if held is not None:
        held.release()
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama", "nanochat"])
def test_the_chunked_loss_gives_the_models_own_gradient(family: str, dtype: torch.dtype | None) -> None:
    assert family in CONFIGS
    model = make_model(family).cuda()
    groups = cut_window(make_window64().lengths, TokenBudget(tokens=300))
    own = gradient(model, groups, dtype, chunked=False)
    for smoothing in (0.0, 0.1):
        own = gradient(model, groups, dtype, chunked=False, smoothing=smoothing)
        chunked = gradient(model, groups, dtype, chunked=True, smoothing=smoothing)
        assert float((chunked - own).norm() / own.norm()) <= (1e-5 if dtype is None else 2e-2)


def test_gradients_on_the_host_are_the_same() -> None:
    model = make_model("llama").cuda()
    groups = cut_window(make_window64().lengths, FixedSize(samples=8))
    plain, held = gradient(model, groups, None), gradient(model, groups, None, host=torch.device("cpu"))
    assert float((plain - held).norm() / plain.norm()) <= 1e-6


def test_host_memory_holds_the_gradients_between_micro_batches() -> None:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
                    vocab_size=32000, max_position_embeddings=128)
    ).cuda()  # fmt: skip
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    ids = torch.randint(0, 32000, (2, 64), device=CUDA)
    for on_host in (False, True):
        parameters = list(model.parameters())
        held = (
            gradients_for(parameters, in_fp32=True, host=torch.device("cpu"))
            if on_host
            else SeparateAccumulator(parameters)
        )
        window = Window(parameters, torch.optim.SGD(parameters, lr=0.0), gradients=held)
        before = torch.cuda.memory_allocated()
        window.open(100)
        window.add(model(input_ids=ids).logits.float().logsumexp(-1).sum())
        held.sums()  # waits until they have arrived
        taken = torch.cuda.memory_allocated() - before
        window.abandon()
        held.release()
        keep(f"gradients_on_host_{on_host}", {"bytes": taken, "weights_bytes": weights})
        assert (taken < 0.1 * weights) is on_host


def test_a_vocabulary_of_128k_takes_a_third_of_the_memory() -> None:
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8,
        vocab_size=128 * 1024, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).cuda()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    ids = torch.randint(0, config.vocab_size, (2, 4096))
    from workers.training.micro_batches.batches import MicroBatch

    predicted = torch.cat([torch.arange(4095), 4096 + torch.arange(4095)])
    batch = MicroBatch(ids, predicted, ids.flatten()[predicted + 1], (4096, 4096)).to(CUDA)
    peaks = {}
    for name, chunked in (("full", False), ("chunked", True)):
        loss = TokenLoss(model, chunked=chunked)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                forward = loss(batch)
            forward.loss_sum.backward()
        peaks[name] = torch.cuda.max_memory_allocated() - weights
    keep("vocabulary_128k", peaks)
    assert peaks["full"] >= 3 * peaks["chunked"]


WHOLE = RankPlan(
    rank=0, gpu_id=0, micro_batch_rule=TokenBudget(tokens=64 * 512), expected_micro_batches=1,
    micro_batch_size=64, predicted_peak_bytes=0, memory_limit_bytes=0,
)  # fmt: skip


def test_a_window_that_does_not_fit_is_replayed_in_smaller_micro_batches() -> None:
    """A real out-of-memory error under a capped memory fraction, until a budget fits."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        vocab_size=8192, max_position_embeddings=1024,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    window, learned = Window(model.parameters(), optimizer, Clipping(1.0)), LearnedBudget()
    rows = [torch.randint(0, 8192, (512,)) for _ in range(64)]
    loss, budget, failures = TokenLoss(model, chunked=False), 64 * 512, 0
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction(2.5 * 2**30 / total)
    try:
        while True:
            from tests.harness.small_models import Window64

            data = Window64([(r.numpy().astype("int32"), (r >= 0).numpy()) for r in rows], [1.0] * 64)
            failed = False
            window.open(data.targets)
            groups = cut_window(data.lengths, TokenBudget(tokens=budget))
            try:
                for group in groups:
                    window.add(loss(data.batch(group).to(CUDA)).loss_sum)
            except torch.OutOfMemoryError:
                failed = True
            if not failed:
                break
            window.abandon()
            torch.cuda.empty_cache()
            budget = Budget(WHOLE, learned, 64).lower_after_failure(budget)
            failures += 1
        assert window.close().applied
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    keep("out_of_memory", {"failures": failures, "budget": budget})
    assert failures >= 1
    assert budget < 64 * 512


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_our_code_does_not_synchronise_within_a_window(dtype: torch.dtype) -> None:
    """PyTorch itself warns where the host waits; only transformers' search for packed rows may wait, and what
    runs outside of our code."""
    import traceback
    import warnings

    model, data = make_model("gpt2").cuda(), make_window64()
    parameters = list(model.parameters())
    window = Window(parameters, torch.optim.AdamW(parameters, fused=True), Clipping(1.0))
    loss = TokenLoss(model)
    batches = [data.batch(g).to(CUDA) for g in cut_window(data.lengths, FixedSize(samples=8))]
    waits = []
    with torch.autocast("cuda", dtype=dtype):  # the first pass of all also sets up libraries
        loss(batches[0]).loss_sum.backward()
    model.zero_grad(set_to_none=True)

    def noted(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            frames = [f for f in traceback.extract_stack() if "workers/training" in f.filename]
            packed = any("masking_utils" in f.filename for f in traceback.extract_stack())
            waits.append((packed, frames[-1].name if frames else "elsewhere"))

    window.open(data.targets)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for batch in batches:
                with torch.autocast("cuda", dtype=dtype):
                    forward = loss(batch)
                window.add(forward.loss_sum)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    keep(f"waits_{dtype}", {"of transformers": len(waits) / len(batches)})
    assert [
        place for is_of_transformers, place in waits if not is_of_transformers and place != "elsewhere"
    ] == []
    assert window.close().applied
