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


@dataclass(frozen=True)
class SavedHead:
    """The head that a model's files hold."""

    names: tuple[str, ...]
    """The names of its scores; empty if the files hold none."""
    order: tuple[int, ...] | None
    """For each score of the wanted head, the place of the same score in the files; None if the files hold
    another head, or none."""


def configure(config: Any, head: ScoreHead) -> SavedHead:
    """Changes a model's config to that of a model with this head. Returns what the files hold."""
    names = tuple(map(str, config.id2label.values())) if scores_sequences(config) else ()
    order = None
    if sorted(names) == sorted(head.names):
        order = tuple(names.index(name) for name in head.names)
    elif len(names) == len(head.names) == 1:  # a reward, whatever it is called
        order = (0,)
    config.id2label = dict(enumerate(head.names))
    config.label2id = {name: number for number, name in enumerate(head.names)}
    config.problem_type = "single_label_classification" if len(head.names) > 1 else None
    return SavedHead(names, order)


def arrange(layer: nn.Linear, order: Sequence[int]) -> None:
    """Brings the scores of a layer into another order.

    Args:
        order: for each score, the place where it is now.
    """
    with torch.no_grad():
        layer.weight.copy_(layer.weight[list(order)].clone())
        if layer.bias is not None:
            layer.bias.copy_(layer.bias[list(order)].clone())


def scores_sequences(config: Any) -> bool:
    """Whether a model was saved with a head that scores whole sequences."""
    return any(_CLASS in str(each) for each in config.architectures or ())


def set_padding_token(config: Any, pad_id: int) -> None:
    """Tells a model which token pads: it reads scores at the last token that is another one."""
    config.pad_token_id = config.get_text_config().pad_token_id = pad_id


def align_tokenizer(tokenizer: Any, config: Any) -> None:
    """Lets a tokenizer pad with the token that the model takes for padding: otherwise, the model could not be
    used for several texts at once."""
    pad_id = config.get_text_config().pad_token_id
    if pad_id is not None and tokenizer.pad_token_id != pad_id:
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
