"""Makes `accrue/tiny-gpt2`, a small GPT-2 with one token per byte, from a seed and without a network."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

SEED = 20_260_101
END, PAD, TURN, TURN_END = "<|endoftext|>", "<|pad|>", "<|turn|>", "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def ensure_tiny_gpt2(target: Path) -> None:
    """Makes the model's directory if it does not exist; several processes may call this at the same time."""
    if (target / "config.json").exists():
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    make_model().save_pretrained(partial)
    make_tokenizer().save_pretrained(partial)
    try:
        partial.rename(target)
    except OSError:  # another process was first; its model is the same
        shutil.rmtree(partial)


def make_model() -> Any:
    """Two layers of width 128, 1,024 positions; the same weights each time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=128, n_head=4, n_positions=1024, vocab_size=260,
        bos_token_id=256, eos_token_id=256, pad_token_id=257,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return GPT2LMHeadModel(config)


def make_tokenizer() -> Any:
    """One token per byte of UTF-8, and four special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, PAD, TURN, TURN_END])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN, TURN_END],
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
