"""Small models of three families, and samples of unequal length with masked prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig

from workers.training.batches import collate

VOCABULARY = 61
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=VOCABULARY,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "llama": lambda: LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64,
    ),
    "opt": lambda: OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0,
    ),
}  # fmt: skip


@dataclass
class Window64:
    """Sixty-four samples: tokens, and which of them count."""

    rows: list[tuple[Any, Any]]

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens, _ in self.rows]

    @property
    def targets(self) -> int:
        return sum(int(counts[1:].sum()) for _, counts in self.rows)

    def batch(self, group: list[int]) -> Any:
        return collate(lambda sample: self.rows[sample], group, pad_id=0)


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[family]()).to(dtype).train()


def make_window64() -> Window64:
    """Lengths from 2 to 60; the first third of each is a prompt; two have no target at all."""
    random = np.random.default_rng(3)
    rows = []
    for sample in range(64):
        length = int(random.integers(2, 60))
        counts = np.arange(length) >= length // 3
        rows.append(
            (random.integers(1, VOCABULARY, length).astype(np.int32), counts & (sample not in (5, 40)))
        )
    return Window64(rows)
