"""The head that scores whole sequences: of classifiers, a score for each class; of reward models, one score.

The score is read at a sequence's last token that is not the padding token, as transformers' own classes for
sequence classification do, so that these give the same scores with the saved model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from workers.training.exceptions import CannotTrain

_CLASS = "ForSequenceClassification"
"""Part of the names of transformers' classes."""
NAME = "score"
LANGUAGE_HEADS = frozenset({"lm_head.weight", "lm_head.bias", "embed_out.weight"})
"""Weights of a language model's output head, which a model that scores sequences does not have."""
PROBED_CLASSES = 997
"""The classes of the probe (`probe_layer`)."""


@dataclass(frozen=True)
class ScoreHead:
    """What a model's head scores."""

    names: tuple[str, ...]
    """The names of its scores: the classes, or a single one for rewards."""
    seed: int = 0
    """Determines the first weights of a new head."""


def configure(config: Any, head: ScoreHead) -> bool:
    """Makes a model's config that of a model with the head. Returns whether the files hold the same head."""
    numbered = dict(enumerate(head.names))
    is_same = scores_sequences(config) and config.id2label == numbered
    config.id2label = numbered
    config.label2id = {name: number for number, name in numbered.items()}
    config.problem_type = "single_label_classification" if len(numbered) > 1 else None
    return is_same


def scores_sequences(config: Any) -> bool:
    """Whether a model was saved with a head that scores whole sequences."""
    return any(_CLASS in str(each) for each in config.architectures or ())


def use_padding_token(model: Any, tokenizer: Any, pad_id: int) -> None:
    """Lets the saved model and its tokenizer agree on the token that pads: without one, the model could not
    be used for several texts at once."""
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = pad_id
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)


def score_layer_of(model: Any) -> nn.Linear | None:
    """The layer that makes scores of hidden states; None if the model is a language model.

    Raises:
        CannotTrain: the scores come from something else than one linear layer.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if _CLASS not in type(inner).__name__:
        return None
    layer = getattr(inner, NAME, None)
    trained = getattr(layer, "modules_to_save", None)  # peft's copy, which is trained beside adapters
    layer = layer if trained is None else trained["default"]
    if type(layer) is not nn.Linear:
        raise CannotTrain(
            "not_supported",
            f"the scores of {type(inner).__name__} do not come from one linear layer, which classification "
            "and reward models need: choose a model of another family",
        )
    return layer


def initialise(layer: nn.Linear, config: Any, seed: int) -> None:
    """Draws the weights of a new head: normally distributed, as transformers initialises linear layers."""
    deviation = getattr(config.get_text_config(), "initializer_range", None) or 0.02
    drawn = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed)) * deviation
    with torch.no_grad():
        layer.weight.copy_(drawn)
        if layer.bias is not None:
            layer.bias.zero_()


def probe_layer(layer: nn.Linear) -> nn.Linear:
    """A layer of fixed random weights, for the checks before training. With it, every token has a
    loss, so that the checks work as for a language model; the real head gives only one score per sequence."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(PROBED_CLASSES, layer.in_features, generator=generator) / layer.in_features**0.5
    made = nn.Linear(layer.in_features, PROBED_CLASSES, bias=False, device="meta")
    made.weight = nn.Parameter(drawn.to(layer.weight.device, layer.weight.dtype), requires_grad=False)
    return made


def ends(sequences: Sequence[npt.NDArray[np.int32]], pad_id: int) -> npt.NDArray[np.int64]:
    """Where the score of each sequence is read: at its last token that is not `pad_id`; if it has only such
    tokens, at its first."""
    found = [np.flatnonzero(tokens != pad_id) for tokens in sequences]
    return np.array([each[-1] if len(each) else 0 for each in found], np.int64)


@torch.no_grad()
def score_error(
    model: Any, layer: nn.Linear, hidden: Tensor, end: int, input_ids: Tensor, arguments: dict[str, Any]
) -> Tensor:
    """The largest difference between the scores of a sequence and those of the model itself, relative to the
    largest score or 1e-3.

    Args:
        hidden: the hidden states of the sequence, of shape (tokens, width).
        end: where its score is read.
        input_ids: of shape (1, tokens).
        arguments: of the model's forward pass.
    """
    own: Tensor = model(input_ids=input_ids, **arguments).logits[0].float()
    found = nn.functional.linear(hidden[end].to(layer.weight.dtype), layer.weight, layer.bias).float()
    if own.shape != found.shape:
        return own.new_full((), torch.inf)
    error: Tensor = (own - found).abs().max() / own.abs().max().clamp(min=1e-3)
    return error
