"""Small models of five families, and samples of unequal length and weight with masked prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    NanoChatConfig,
    OPTConfig,
)

from workers.training.losses.loss import TokenLoss
from workers.training.micro_batches.batches import BatchLayout, MicroBatch, Row, collate

VOCABULARY = 61
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0,
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
    "opt_gelu": lambda: OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0, activation_function="gelu",
    ),
    "mixtral": lambda: MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64,
        num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.05, sliding_window=None,
        experts_implementation="eager",
    ),
    "nanochat": lambda: NanoChatConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64,
        final_logit_softcapping=2.0, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    ),
}  # fmt: skip
"""nanochat's cap on logits is low enough to matter at this size. (Gemma is left out: its norms sum gradients
in fp32 whatever the model's precision, so it cannot be tested in fp64.)"""

PLAIN = ("gpt2", "llama", "opt", "opt_gelu")
"""Families whose loss is cross-entropy of their head's own logits."""

DISCONTINUOUS = ("opt", "mixtral")
"""Families with discontinuous gradients: the last bit of an activation, which depends on the processor, can
switch a ReLU at its kink or an expert at a tie. In fp32 this happens now and then, so that no agreement can
be promised; in fp64 the last bit is too small for it to happen."""


def promised(family: str, dtype: torch.dtype) -> bool:
    """Whether splits agree to rounding in that precision, on any processor."""
    return dtype == torch.float64 or family not in DISCONTINUOUS


@dataclass
class Window64:
    """Sixty-four samples: tokens, which of them count, and each sample's weight."""

    rows: list[Row]
    weights: list[float]

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens, _ in self.rows]

    @property
    def targets(self) -> int:
        return sum(int(counts[1:].sum()) for _, counts in self.rows)

    @property
    def weighted_targets(self) -> float:
        """The window's denominator where samples are weighted."""
        counts = [int(counts[1:].sum()) for _, counts in self.rows]
        return float(np.dot(np.float32(self.weights).astype(float), counts))

    def batch(self, group: list[int], *, weighted: bool = False, **form: Any) -> MicroBatch:
        weights = [self.weights[i] for i in group] if weighted else None
        return collate([self.rows[i] for i in group], BatchLayout(0, **form), weights)


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa").to(dtype).train()
    model.warn_if_padding_and_no_attention_mask = lambda *_: None
    return model


def loss_sum(model: Any, batch: MicroBatch) -> torch.Tensor:
    """The summed loss; the head is applied separately where possible."""
    return TokenLoss(model)(batch).loss_sum


def make_window64() -> Window64:
    """Samples of 2 to 59 tokens: the first third of each is a prompt, and two samples have no target."""
    random = np.random.default_rng(3)
    rows = []
    for sample in range(64):
        length = int(random.integers(2, 60))
        counts = np.arange(length) >= length // 3
        rows.append(
            (random.integers(1, VOCABULARY, length).astype(np.int32), counts & (sample not in (5, 40)))
        )
    return Window64(rows, random.choice([0.1, 1.0, 2.5], 64).tolist())
