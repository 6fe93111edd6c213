"""The training method of a job that starts from adapters of an earlier one."""

from app.contract.arguments import LoraMethod, QloraMethod
from app.contract.model_reference import ModelReference
from app.contract.spec import MethodSpec
from app.errors import Unprocessable
from app.jobs.training_config import TrainingConfig
from app.planning.defaults import method_spec

_FIELD = "training_config.method"
_KEPT = ("r", "alpha", "target_modules")


def training_from(model: ModelReference, training: TrainingConfig) -> TrainingConfig:
    """The training configuration of a job that starts from a model: adapters are trained further, unless the
    request names a method."""
    continued = model.continued_adapters(adapters=True)
    if continued is None or "method" in training.model_fields_set:
        return training
    given = training.model_dump(exclude_unset=True)
    return TrainingConfig.model_validate({**given, "method": "lora"})


def method_from(model: ModelReference, training: TrainingConfig) -> MethodSpec:
    """The method of a job that starts from a model. Adapters that are trained further keep their rank, scale
    and layers.

    Raises:
        Unprocessable: the request asks for other adapters than the model has, or for 4-bit weights where
            weights must be replaced first.
    """
    method = method_spec(training.method)
    continued = model.continued_adapters(adapters=method.lora is not None)
    replaced = [layer for layer in model.layers if layer is not continued]
    if method.name == "qlora" and replaced:
        raise Unprocessable(
            f"qlora cannot start from {model.name}: it was saved as changes to the weights of "
            f"{model.base_name}, which cannot be applied once these are in 4 bits. Choose lora, or start "
            "from a model that was saved whole.",
            field=_FIELD,
        )
    if continued is None or continued.lora is None or method.lora is None:
        return method
    own = training.method
    given = own.lora if isinstance(own, LoraMethod) else own.qlora if isinstance(own, QloraMethod) else None
    kept = {name: getattr(continued.lora, name) for name in _KEPT}
    named = given.model_fields_set if given is not None else set()
    for name, value in kept.items():
        if name in named and getattr(method.lora, name) != value:
            raise Unprocessable(
                f"{model.name} has adapters with {name} {value}, and a job that starts from them trains them "
                f"further: leave {name} out, or choose the method full, which merges them into the model.",
                field=_FIELD,
            )
    return method.model_copy(update={"lora": method.lora.model_copy(update=kept)})
