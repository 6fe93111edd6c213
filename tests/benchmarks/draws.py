"""Random combinations of model shapes and options for the accuracy benchmark.

A seed fixes the draw. Shapes are odd on purpose (sizes that are no multiples of 64, biases, one key-value
head, vocabularies that do not divide anything), and small, so that a case takes seconds.
"""

from random import Random
from typing import Any

from tests.benchmarks.accuracy import FAMILIES, Case

MAX_WEIGHTS = 24_000_000
"""The maximum number of parameters in the embedding and the output head together."""


def draw(count: int, seed: int) -> list[Case]:
    """Draws `count` cases. With the same seed, a longer draw begins with the cases of a shorter one."""
    random = Random(seed)
    return [drawn(random) for _ in range(count)]


def drawn(random: Random) -> Case:
    """A family with another shape, a micro-batch and options."""
    family = random.choice(list(FAMILIES))
    shape = shape_of(family, random)
    return Case(
        family,
        rows=random.randint(1, 8),
        sequence=random.randint(16, 300),
        micro_batches=random.randint(1, 3),
        options=options_of(family, random),
        shape=shape,
    )


def options_of(family: str, random: Random) -> dict[str, Any]:
    """Options as `true_peak` takes them, without those that have their default value."""
    optimizers = ["adamw", "sgd", "adafactor", "lion", "lamb", "lars"]
    found: dict[str, Any] = {
        "method": random.choice(["full", "lora"]),
        "precision": random.choice(["no", "bf16", "pure_bf16"]),
        "checkpointing": random.random() < 0.5,
        "smoothing": random.random() < 0.33,
        "packing": random.random() < 0.33,
        "optimizer": random.choice(optimizers),
        "attention": random.choice(["sdpa", "sdpa", "eager"]),
    }
    if family == "mixtral":
        found["aux_scope"] = random.choice(["window", "sequence", "none"])
    usual = {"method": "full", "precision": "no", "checkpointing": False, "smoothing": False,
             "packing": False, "optimizer": "adamw", "attention": "sdpa"}  # fmt: skip
    return {name: value for name, value in found.items() if usual.get(name) != value}


def shape_of(family: str, random: Random) -> dict[str, Any]:
    """Random sizes for the family's config."""
    heads = random.randint(1, 8)
    width = 2 * random.randint(8, 36)  # rotary embeddings take pairs
    if family == "mixtral":
        width = 8 * random.randint(2, 9)  # torch's grouped product takes whole 16 bytes, in bf16 too
    hidden = heads * width
    vocabulary = random.randint(300, min(50_000, MAX_WEIGHTS // hidden))
    layers = random.randint(2, 9)
    inner = random.randint(hidden, 4 * hidden)
    groups = random.choice([n for n in range(1, heads + 1) if heads % n == 0] + [1])
    plain = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocabulary,
        "tie_word_embeddings": random.random() < 0.5,
    }  # fmt: skip
    biased = random.random() < 0.5
    window = random.choice([None, 40, 100, 4096])
    match family:
        case "gpt2":
            return {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocabulary}
        case "bloom":
            return {"n_layer": layers, "hidden_size": hidden, "n_head": heads, "vocab_size": vocabulary}
        case "opt":
            return {
                "hidden_size": hidden, "ffn_dim": inner, "num_hidden_layers": layers,
                "num_attention_heads": heads, "vocab_size": vocabulary, "word_embed_proj_dim": hidden,
            }  # fmt: skip
        case "falcon":
            several = random.random() < 0.5
            own = {"new_decoder_architecture": True, "num_kv_heads": groups} if several else {}
            return {
                "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
                "vocab_size": vocabulary, "bias": biased, **own,
            }  # fmt: skip
        case "gpt_neox":
            own = {name: plain[name] for name in plain if name != "num_key_value_heads"}
            return {**own, "attention_bias": biased, "use_parallel_residual": random.random() < 0.5}
        case "llama":
            return {**plain, "attention_bias": biased, "mlp_bias": random.random() < 0.5}
        case "qwen3":
            return {**plain, "attention_bias": biased, "head_dim": random.choice([width, 48])}
        case "gemma2" | "gemma3":
            own = {"head_dim": random.choice([width, 48]), "sliding_window": window or 64}
            return {**plain, "attention_bias": biased, **own}
        case "mistral":
            return {**plain, "sliding_window": window}
        case "mixtral":
            experts = random.randint(2, 6)
            own = {"num_local_experts": experts, "num_experts_per_tok": random.randint(1, min(3, experts))}
            return {**plain, "intermediate_size": 8 * random.randint(hidden // 16, hidden // 4), **own}
    return plain
