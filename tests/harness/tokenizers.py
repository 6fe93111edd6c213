"""Small tokenizers that treat the beginning of a text differently."""

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from app.contract.data_formats import parse_line
from workers.training.data.encoding import ExampleEncoder

TEXTS = [" hello world the answer is 4 \n", " 4 5 6", "le caf\u00e9 \u2603"] * 5
ROLES = ["<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def made(kind: str) -> Any:
    """A small tokenizer like Llama's of the first releases (legacy), or with Metaspace's two schemes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    special = ["<unk>", "<s>", "</s>", *ROLES, *(f"<0x{byte:02X}>" for byte in range(256))]
    if kind == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="\u2581", prepend_scheme=kind, split=False
        )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    own = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=ROLES,
    )  # fmt: skip
    own.chat_template = TEMPLATE
    return own


def tokens_of(tokenizer: Any, sample: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """A sample's tokens, and which of them count."""
    with ExampleEncoder(tokenizer) as encoder:
        ((_, [(tokens, counts)]),) = encoder.samples([(1, parse_line(json.dumps(sample))[1])])
    return tokens, counts
