"""Accrue's kernels and PyTorch's that it calls directly, compared with fp64 or with plain operators."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from workers.training.kernels.varlen_attention import within_samples

CUDA = torch.device("cuda")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("rows", "vocabulary", "scale", "smoothing", "weighted"),
    [(100, 128256, 1.0, 0.0, False), (64, 50257, 0.5, 0.1, True), (33, 260, 2.0, 0.0, True)],
)
def test_the_fused_cross_entropy_is_that_in_fp64(
    rows: int, vocabulary: int, scale: float, smoothing: float, weighted: bool
) -> None:
    from workers.training.kernels.fused_cross_entropy import cross_entropy

    logits = (torch.randn(rows, vocabulary, device=CUDA) * 5).bfloat16()
    targets = torch.randint(0, vocabulary, (rows,), device=CUDA)
    weights = torch.rand(rows, device=CUDA) if weighted else None
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact * scale, targets, reduction="none", label_smoothing=smoothing)
    losses = losses if weights is None else losses * weights
    losses.sum().backward()
    found = cross_entropy(logits, targets, weights, scale=scale, smoothing=smoothing, with_gradient=True)
    assert float((found - losses).abs().max()) < 1e-4
    assert exact.grad is not None
    assert float((logits.double() - exact.grad).norm() / exact.grad.norm()) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("key_heads", [8, 2, 1])
def test_attention_within_samples_is_that_of_each_sample(key_heads: int, dtype: torch.dtype) -> None:
    lengths = (1, 77, 300, 5)
    begins = torch.tensor([0, 1, 78, 378, 383], dtype=torch.int32, device=CUDA)
    query, key, value = (
        torch.randn(sum(lengths), heads, 64, device=CUDA, dtype=dtype, requires_grad=True)
        for heads in (8, key_heads, key_heads)
    )
    outer = torch.randn(sum(lengths), 8, 64, device=CUDA, dtype=dtype)
    found = within_samples(query, key, value, begins, max(lengths), None)
    gradients = torch.autograd.grad(found, (query, key, value), outer)
    exact = [each.detach().double().requires_grad_() for each in (query, key, value)]
    own = []
    for start, length in zip(begins.tolist(), lengths, strict=False):
        part = [each[start : start + length].transpose(0, 1)[None] for each in exact]
        own.append(F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    whole = torch.cat(own)
    expected = torch.autograd.grad(whole, exact, outer.double())
    for ours, theirs in zip((found, *gradients), (whole, *expected), strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 2e-2


def test_products_of_bf16_are_added_in_fp32() -> None:
    sums = torch.randn(500, 64, device=CUDA)
    errors, states = (torch.randn(40, width, device=CUDA).bfloat16() for width in (500, 64))
    expected = sums.double() + errors.double().t() @ states.double()
    torch.ops.aten.addmm.dtype_out(sums, errors.t(), states, torch.float32, out=sums)
    assert float((sums.double() - expected).norm() / expected.norm()) < 1e-5


def test_profiles_are_made_in_forks_of_a_cuda_build() -> None:
    """As the profiler makes them, which sees no GPU."""
    program = """
from app.contract.memory_profile import Recipe
from tests.gpu.kernels import GPT2
from workers.profiling.profile import profiles
from workers.profiling.parallel_forks import run_in_forks

for precision in ("bf16", "fp32"):
    made = list(profiles(GPT2, Recipe(device="cuda", precision=precision), 128, run_in_forks))
    print(made[-1].check_error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 2
