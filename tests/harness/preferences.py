"""Data for tests of objectives other than supervised fine-tuning, and the gradient of a window of it."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from app.contract.objective import FORMATS, OBJECTIVE_ARGUMENTS, ObjectiveSpec, OtherObjectiveName
from app.contract.spec import ValidationSpec
from tests.harness.runs import create_run, small_data
from tests.harness.specs import make_spec
from workers.run_directory import RunDirectory
from workers.training.data.batch_loader import lay_out
from workers.training.data.preparation import Samples, prepare
from workers.training.losses.loss import TokenLoss
from workers.training.losses.window_scope import tokens_factor
from workers.training.micro_batches.batches import BatchLayout, Groups
from workers.training.models import head as heads
from workers.training.models.auto_class import auto_class
from workers.training.models.score_head import ends
from workers.training.models.tiny_gpt2 import make_tokenizer
from workers.training.window import Window

VOCABULARY = 300
PREFERENCES: tuple[OtherObjectiveName, ...] = ("dpo", "orpo", "simpo", "kto", "reward")
OBJECTIVES: tuple[OtherObjectiveName, ...] = (*PREFERENCES, "classification")
CLASSES = ("long", "medium", "short")


def objective_spec(name: OtherObjectiveName, **given: Any) -> ObjectiveSpec:
    """The objective with its default arguments; keyword arguments replace them."""
    return ObjectiveSpec.model_validate({"name": name, **OBJECTIVE_ARGUMENTS[name], **given})


def write_preferences(
    path: Path, name: OtherObjectiveName, count: int = 24, seed: int = 0, *, weighted: bool = False
) -> Path:
    """Pairs, or labelled completions for KTO, or labelled texts for classification, of unequal lengths."""
    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefghij klmnop"))

    def text() -> str:
        return "".join(random.choice(letters, int(random.integers(3, 20))))

    row: dict[str, Any]
    rows: list[dict[str, Any]] = []
    for number in range(count):
        if name == "classification":
            own = text()
            row = {"text": own, "label": CLASSES[2 if len(own) < 8 else 1 if len(own) < 14 else 0]}
            rows.append(row | ({"weight": 0.5 + number % 3} if weighted else {}))
            continue
        row = {"prompt": text()}
        row |= {"completion": text()} if name == "kto" else {"chosen": text(), "rejected": text()}
        row |= {"label": number % 3 > 0} if name == "kto" else {}
        rows.append(row | ({"weight": 0.5 + number % 3} if weighted else {}))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preference_data(name: OtherObjectiveName, examples: int, **changes: Any) -> Any:
    """The spec of such data."""
    own = {"format": FORMATS[name][0], "with_mismatches": name == "kto"}
    classes = CLASSES if name == "classification" else ()
    return small_data(**{**own, "classes": classes, "examples": examples, **changes})


def preference_samples(folder: Path, spec: ObjectiveSpec, count: int = 24, **options: Any) -> Samples:
    """Tokenised samples with the objective, and with references that are drawn at random."""
    source = write_preferences(folder / "preferences.jsonl", spec.name, count, **options)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    prepare(preference_data(spec.name, count, sha256=digest), source, make_tokenizer(), folder / "prepared")
    samples = Samples(folder / "prepared")
    reference = np.random.default_rng(1).normal(-40.0, 5.0, samples.reference.shape)
    samples.begin_objective(spec, reference)
    return samples


def gradients_of(
    model: Any,
    samples: Samples,
    groups: Groups,
    *,
    layout: BatchLayout | None = None,
    chunk: int = 10**9,
    chunked: bool = True,
) -> tuple[float, dict[str, Tensor], tuple[float, ...]]:
    """The loss of one window of all samples, its gradient, and what the objective measured.

    Args:
        groups: its micro-batches.
        chunk: positions whose logits are computed at once.
    """
    with patch.object(heads, "rows_of_chunk", lambda vocabulary, device: chunk):
        return _gradients_of(model, samples, groups, layout or BatchLayout(pad_id=0), chunked=chunked)


def _gradients_of(
    model: Any, samples: Samples, groups: Groups, layout: BatchLayout, *, chunked: bool
) -> tuple[float, dict[str, Tensor], tuple[float, ...]]:
    loss, device = TokenLoss(model, chunked=chunked), next(model.parameters()).device
    loss.begin_objective(samples.objective or objective_spec("classification"))
    everything = np.arange(len(samples))
    if loss.objective is not None:
        loss.objective.tokens_factor = tokens_factor(samples, everything)
    if loss.objective is not None and loss.objective.spec.name == "kto":
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for group in groups:
            batch = lay_out(samples, group, layout, mismatches=True).to(device)
            assert batch.scoring is not None
            scores = loss(batch, only_score=True).loss_sum - batch.scoring.reference
            sums += torch.stack([(batch.scoring.weights * scores).sum(), batch.scoring.weights.sum()])
        loss.objective.set_divergence(sums)
    window = Window(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.0))
    window.open(samples.denominator(everything))
    for group in groups:
        forward = loss(lay_out(samples, group, layout).to(device))
        window.add(forward.loss_sum, measured=forward.measured)
    found = {
        name: window.gradient()[parameter].clone()
        for name, parameter in model.named_parameters()
        if parameter in window.gradient()
    }
    closed = window.close()
    return closed.loss, found, closed.measured


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference between two gradients, relative to the norm of the second."""
    assert one.keys() == other.keys()
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return float((apart / sum(float(each.double().square().sum()) for each in other.values())) ** 0.5)


def plain_losses(model: Any, samples: Samples, chosen: Sequence[int]) -> Tensor:
    """The mean loss of a window as the papers write it: each sequence alone, full logits, plain formulas."""
    spec = samples.objective or objective_spec("classification")

    def log_probs(sample: int, sequence: int, *, whole: bool = False) -> Tensor:
        tokens, counts = (torch.from_numpy(np.array(each)) for each in samples.read(sample, sequence))
        logits = model(input_ids=tokens[None].long()).logits[0, :-1]
        each = logits.log_softmax(-1).gather(1, tokens[1:, None].long())[:, 0]
        return each if whole else each[counts[1:].bool()]

    def ratio(sample: int, sequence: int) -> Tensor:
        return log_probs(sample, sequence).sum() - samples.reference[sample, sequence]

    def scores(sample: int, sequence: int) -> Tensor:
        """By the model's own head, at the last token that does not pad."""
        tokens, _ = samples.read(sample, sequence)
        hidden = model.base_model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state
        found: Tensor = model.score(hidden[0, int(ends([tokens], pad_id=0)[0])])
        return found

    weights = torch.from_numpy(samples.weights[list(chosen)]).double()
    mean = weights / weights.sum()
    sigmoid = torch.nn.functional.logsigmoid
    if spec.name == "classification":
        assert samples.classes is not None
        right = [scores(each, 0).log_softmax(-1)[samples.classes[each]] for each in chosen]
        return -(mean * torch.stack(right)).sum()
    if spec.name == "reward":
        ranked = [(scores(each, 0)[0], scores(each, 1)[0]) for each in chosen]
        centered = [spec.center_rewards_coefficient * (a + b) ** 2 for a, b in ranked]
        apart = [-sigmoid(a - b) for a, b in ranked]
        return (mean * (torch.stack(apart) + torch.stack(centered))).sum()
    if spec.name == "kto":
        assert samples.labels is not None
        with torch.no_grad():
            divergence = (mean * torch.stack([ratio(each, 1) for each in chosen])).sum().clamp(min=0)
        own = []
        for each in chosen:
            sign, scale = (
                (1, spec.desirable_weight) if samples.labels[each] else (-1, spec.undesirable_weight)
            )
            own.append(scale * (1 - (sign * spec.beta * (ratio(each, 0) - divergence)).sigmoid()))
        return (mean * torch.stack(own)).sum()
    if spec.name == "dpo":
        margins = torch.stack([spec.beta * (ratio(each, 0) - ratio(each, 1)) for each in chosen])
        smooth = spec.label_smoothing
        return (mean * (-(1 - smooth) * sigmoid(margins) - smooth * sigmoid(-margins))).sum()
    pairs = [(log_probs(each, 0).mean(), log_probs(each, 1).mean()) for each in chosen]
    if spec.name == "simpo":
        return (mean * torch.stack([-sigmoid(spec.beta * (a - b) - spec.gamma) for a, b in pairs])).sum()
    odds = torch.stack([(a.exp() / (1 - a.exp())).log() - (b.exp() / (1 - b.exp())).log() for a, b in pairs])
    wholes = [log_probs(each, 0, whole=True) for each in chosen]
    tokens = sum(weight * len(whole) for weight, whole in zip(weights, wholes, strict=True))
    likelihood = sum(weight * whole.sum() for weight, whole in zip(weights, wholes, strict=True)) / tokens
    return (mean * -spec.beta * sigmoid(odds)).sum() - likelihood


def scores_of(name: OtherObjectiveName) -> int:
    """The scores that a model gives to a sequence."""
    return {"classification": len(CLASSES), "reward": 1}.get(name, 0)


def make_model(family: str, dtype: torch.dtype = torch.float64, *, scores: int = 0) -> Any:
    """A small model without dropout, for the built-in tokenizer.

    Args:
        scores: the scores that it gives to a sequence; 0 for a language model.
    """
    from transformers import GPT2Config, LlamaConfig, NanoChatConfig

    configs = {
        "gpt2": lambda: GPT2Config(
            n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=VOCABULARY,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        "llama": lambda: LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64,
        ),
        "nanochat": lambda: NanoChatConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64,
            final_logit_softcapping=2.0, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    config = configs[family]()
    if scores:
        config.num_labels, config.pad_token_id = scores, 0
    return auto_class(config, scores=scores > 0).from_config(config).to(dtype)


def preference_run(folder: Path, name: OtherObjectiveName, **changes: Any) -> RunDirectory:
    """A run of an objective on forty samples, a fifth of them held out."""
    folder.mkdir(parents=True, exist_ok=True)
    write_preferences(folder / "data.jsonl", name, 40)
    share = ValidationSpec(file_id=None, sha256=None, format=None, share=0.2)
    spec = make_spec(
        **{
            "data": preference_data(name, 40, validation=share),
            "objective": objective_spec(name),
            "certificate": True,
            "eval_every": 5,
            **changes,
        }
    )
    return create_run(folder / "run", spec)
