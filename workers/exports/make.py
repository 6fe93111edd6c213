"""Makes an export, and compares it with the trained model."""

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from app.contract.export import FILES, ExportedFile, ExportFormat, ExportOrder, ExportResult, ExportType
from app.contract.spec import MethodSpec
from workers.exports import modelfile, verify
from workers.exports.gguf import convert
from workers.exports.protocol import ExportTask
from workers.exports.refusal import NotExported
from workers.exports.verify import Predictions
from workers.training.models.auto_class import auto_class
from workers.training.models.base_model import check_config, load_tokenizer, prepare_files, read_model
from workers.training.models.model_parts import padding_token
from workers.training.models.saving import save
from workers.training.models.score_head import ScoreHead, scores_sequences, set_padding_token
from workers.training.models.trained_weights import Layer, check_layers, with_layers, with_saved_adapters

_TYPES: dict[ExportType, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "q8_0": torch.float16,
}  # fmt: skip
_WHOLE = MethodSpec(name="full", lora=None)


def make(task: ExportTask) -> ExportResult:
    """Makes the export of a task, and verifies it. All models are computed in fp32, so that only the weights
    can make a difference.

    Raises:
        CannotTrain: the model or the data cannot be read.
        NotExported: the export cannot be made, or does not agree with the model.
    """
    order, target = task.order, Path(task.folder) / FILES
    layers: list[Layer] = list(zip(order.model.layers, map(Path, task.layer_paths), strict=True))
    staged = prepare_files(order.model, task.path, Path(task.temporary) / "base")
    check_layers(layers)
    check_config(staged)
    tokenizer = load_tokenizer(staged)
    samples = verify.samples_of(order, Path(task.data), tokenizer)
    stored = _stored_type(staged)
    expected = _of_trained_model(order, staged, layers, samples)
    type_ = order.type or stored
    notes: list[str] = []
    if order.format == "adapter":
        shutil.copytree(layers[-1][1], target, symlinks=False)
        model, own_tokenizer = _loaded_with_peft(order, staged, layers[:-1], target)
    else:
        merged = _merged(order, staged, layers).to(_TYPES[type_])
        save(merged, tokenizer, target, _WHOLE, "")
        del merged
        gc.collect()
        if not order.model.scores:
            notes += modelfile.write(target, tokenizer, samples)
        if order.format == "gguf":
            target, model, own_tokenizer = convert(task, target, type_, staged)
        else:
            model, own_tokenizer = _loaded_plainly(target)
    verify.check_tokenizer(own_tokenizer, samples, order)
    found = verify.predictions(model, samples)
    verification = verify.compared(expected, found, samples, quantised=type_ == "q8_0")
    if not verification.is_valid:
        remedy = _remedy(order.format, type_)
        raise NotExported(verify.why_not_valid(verification, remedy, scores=bool(order.model.scores)))
    if order.quantised_base:
        notes.append(
            "The adapters were trained on the base model in 4 bits. The export uses the base model's "
            "original weights, and was compared with the adapters on these original weights, "
            "not on the 4-bit ones."
        )
    files = tuple(
        ExportedFile(name=path.name, bytes=path.stat().st_size) for path in sorted(target.iterdir())
    )
    own_type = None if order.format == "adapter" else type_
    return ExportResult(files=files, type=own_type, verification=verification, notes=tuple(notes))


def _remedy(form: ExportFormat, type_: ExportType) -> str:
    """What to try if an export does not agree with the trained model."""
    if form == "adapter" or type_ == "fp32":
        return "this is probably a fault of Accrue or of a library: please report it"
    return "export it as bf16 or fp16" if type_ == "q8_0" else "export it as fp32"


def _of_trained_model(
    order: ExportOrder, staged: Path, layers: list[Layer], samples: list[verify.Sample]
) -> Predictions:
    """What the trained model predicts; adapters are added as in training, not merged."""
    model = _base(order, staged)
    if layers and layers[-1][0].lora is not None:
        model = with_saved_adapters(with_layers(model, layers[:-1]), layers[-1])
    else:
        model = with_layers(model, layers)
    found = verify.predictions(model, samples)
    del model
    gc.collect()
    return found


def _merged(order: ExportOrder, staged: Path, layers: list[Layer]) -> Any:
    """The whole model in fp32."""
    return with_layers(_base(order, staged), layers)


def _base(order: ExportOrder, staged: Path) -> Any:
    """The model below the layers, in fp32."""
    head = ScoreHead(order.model.scores) if order.model.scores else None
    model, _ = read_model(order.model.name, staged, attention="sdpa", dtype=torch.float32, head=head)
    if head is not None:
        set_padding_token(model.config, padding_token(load_tokenizer(staged), model))
    return model


def _loaded_plainly(folder: Path) -> tuple[Any, Any]:
    """A whole model as its users load it."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    scores = scores_sequences(config)
    model = auto_class(config, scores=scores).from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _loaded_with_peft(order: ExportOrder, staged: Path, below: list[Layer], folder: Path) -> tuple[Any, Any]:
    """Adapters on their base model as their users load them."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    base = _base(order, staged)
    if order.model.scores:  # as app/exports/routes.py says: the tokenizer's padding token
        set_padding_token(base.config, tokenizer.pad_token_id)
    return PeftModel.from_pretrained(with_layers(base, below), folder), tokenizer


def _stored_type(staged: Path) -> ExportType:
    """The type in which the weights of the model below adapters, or of a whole trained model, are stored, as
    its config says; fp32 if it says nothing."""
    content = json.loads((staged / "config.json").read_bytes())
    text = content.get("text_config") if isinstance(content.get("text_config"), dict) else {}
    named = content.get("dtype") or content.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(str(named), "fp32")  # type: ignore[return-value]
