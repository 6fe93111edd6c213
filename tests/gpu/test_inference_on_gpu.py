"""Answers on a GPU are those of transformers' `generate` there, one at a time and together."""

import os
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from app.contract.architecture import Architecture
from app.contract.inference import AnswerPart, InferenceOrder, SamplingOptions
from app.contract.model_reference import ModelReference
from workers.inference.batching_check import check_batching
from workers.inference.engine import Engine
from workers.inference.engine_process import EngineProcess
from workers.inference.loading import Loaded
from workers.inference.protocol import AnswerOrder, LoadOrder, Reported
from workers.inference.sampling import SamplingDefaults
from workers.training.models.tiny_gpt2 import ensure_tiny_gpt2, make_tokenizer

CUDA = torch.device("cuda")
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 260, "max_position_embeddings": 512, "initializer_range": 0.1,
    "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257,
}  # fmt: skip
TOKENS = 32


def made(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).to(CUDA, dtype).eval()
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).to(CUDA, dtype).eval()


def prompts() -> list[tuple[int, ...]]:
    source = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 100, (16,), generator=source).tolist()
    return [tuple(torch.randint(97, 122, (length,), generator=source).tolist()) for length in lengths]


def answered(model: Any) -> tuple[list[str], list[int]]:
    """The texts of all prompts together, and how many tokens each has."""
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    texts, counts, left = [""] * 16, [0] * 16, set(range(16))
    reference = ModelReference(name="m", source="local", architecture=_architecture())

    def report(reported: Reported) -> None:
        part: AnswerPart | None = reported.part
        if reported.id is None or part is None:
            return
        assert part.error is None, part.error
        texts[int(reported.id)] += "".join(delta.text for delta in part.deltas)
        if part.usage is not None:
            counts[int(reported.id)] = part.usage.completion_tokens
            left.discard(int(reported.id))
            if not left:
                lines.put(None)

    loaded = Loaded(model, make_tokenizer(), CUDA, SamplingDefaults(), frozenset([256]))
    engine = Engine(loaded, lines, report)
    for number, prompt in enumerate(prompts()):
        order = InferenceOrder(
            model=reference, prompts=(prompt,), max_tokens=TOKENS, sampling=SamplingOptions(temperature=0)
        )
        lines.put(AnswerOrder(id=str(number), order=order).model_dump_json().encode())
    engine.run()
    return texts, counts


def _architecture() -> Architecture:
    return Architecture(
        family="llama",
        layers=4,
        hidden_size=256,
        heads=4,
        key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocabulary=260,
        positions=512,
        gated=True,
        parameters=1,
    )


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_answers_equal_generate_in_fp32(family: str) -> None:
    model = made(family, torch.float32)
    assert check_batching(model, CUDA).agree
    texts, _ = answered(model)
    tokenizer = make_tokenizer()
    own = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=256, pad_token_id=257)
    for prompt, text in zip(prompts(), texts, strict=True):
        given = torch.tensor([prompt], device=CUDA)
        out = model.generate(input_ids=given, attention_mask=torch.ones_like(given), generation_config=own)
        assert text == tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_answers_together(dtype: torch.dtype) -> None:
    model = made("llama", dtype)
    assert check_batching(model, CUDA).agree
    _, counts = answered(model)
    assert all(count > 0 for count in counts)


def test_a_process_in_its_sandbox_answers(tmp_path: Path) -> None:
    assert answered_by_process(tmp_path, "cuda") > 0


def answered_by_process(folder: Path, device: str) -> int:
    """The tokens of an answer by an engine's own process, which had no GPU when it started."""
    data, own, adapters = folder / "data", folder / "own", folder / "adapters"
    own.mkdir()
    adapters.mkdir()
    ensure_tiny_gpt2(data / "model")
    reference = ModelReference(name="accrue/tiny-gpt2", source="built_in", architecture=_architecture())
    engine = EngineProcess({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    try:
        engine.send(
            LoadOrder(
                model=reference, path=str(data / "model"), folder=str(own), adapters=str(adapters),
                hidden=str(data),
                environment={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")},
                device=device,
            )
        )  # fmt: skip
        order = InferenceOrder(
            model=reference, prompts=("hello",), max_tokens=8, sampling=SamplingOptions(seed=0)
        )
        ends = time.monotonic() + 120
        while time.monotonic() < ends:
            for reported in engine.received():
                assert reported.failed is None, reported.failed
                if reported.ready:
                    engine.send(AnswerOrder(id="1", order=order))
                if reported.part is not None:
                    assert reported.part.error is None, reported.part.error
                    if reported.part.usage is not None:
                        return reported.part.usage.completion_tokens
            engine.send_rest()
            time.sleep(0.02)
        raise AssertionError("the process did not answer")
    finally:
        engine.kill()
