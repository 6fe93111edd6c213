"""Base classes of Accrue's schemas.

pydantic builds each at its first use: building all of them would delay each start of the service.
"""

from contextvars import ContextVar
from functools import cache
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_args, get_origin

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    Strict,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticSerializationError, to_json

from app.contract.text import path_to_unstorable, size_error

Flag = Annotated[bool, Strict()]
"""A strict boolean: true or false, but not 1 or "yes"."""

ShortText = Annotated[str, StringConstraints(max_length=200)]
"""A name, or a pattern of names. Whatever a client sends has a limit: only samples may be long."""

UNSTORABLE = "unstorable_text"
"""The error type for text that cannot be stored; the error's context names the field."""

Item = TypeVar("Item")

_is_checked: ContextVar[bool] = ContextVar("_is_checked", default=False)
"""Whether the value that is being validated is a part of one that was checked."""


@cache
def _number_fields(model: type[BaseModel]) -> frozenset[str]:
    """The names under which a request gives a model's numbers."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        kinds = _kinds(field.annotation)
        if kinds & {int, float} and bool not in kinds:
            found.add(name)
            alias = field.validation_alias
            choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
            found |= {each for each in choices if isinstance(each, str)}
    return frozenset(found)


def _kinds(annotation: Any) -> set[Any]:
    """The types of a union, whatever they are annotated with."""
    if get_origin(annotation) is Literal:
        return set()
    return {annotation}.union(*map(_kinds, get_args(annotation)))


def _check_numbers(model: type[BaseModel], given: Any) -> None:
    """Checks that no number is given as true or false, which pydantic would read as 1 or 0.

    Raises:
        ValidationError: one is; it names the field.
    """
    if not isinstance(given, dict):
        return
    numbers = _number_fields(model)
    wrong = [name for name, value in given.items() if isinstance(value, bool) and name in numbers]
    if wrong:
        error = PydanticCustomError("number_type", "must be a number, not true or false")
        raise ValidationError.from_exception_data(
            model.__name__, [InitErrorDetails(type=error, loc=(name,), input=given[name]) for name in wrong]
        )


class RequestPart(BaseModel):
    """An object nested in a request, of which there may be thousands; the enclosing `Request` checks the text
    of all of them at once."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, validate_by_name=True, protected_namespaces=(), defer_build=True
    )


class Request(RequestPart):
    """What a client sends. Unknown fields are rejected by name; infinity and NaN are rejected as numbers."""

    @model_validator(mode="wrap")
    @classmethod
    def _can_be_stored(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Runs before all validation, so that no field needs its own check; the error names the field. Parts
        are checked with the whole."""
        _check_numbers(cls, given)
        if _is_checked.get():
            return validate(given)
        if (why := size_error(given)) is not None:
            raise PydanticCustomError("too_large", "the request {why}", {"why": why})
        if not _is_plainly_storable(given) and (path := path_to_unstorable(given)) is not None:
            raise PydanticCustomError(
                UNSTORABLE, "has a NUL character or a lone surrogate", {"field": ".".join(path)}
            )
        before = _is_checked.set(True)
        try:
            return validate(given)
        finally:
            _is_checked.reset(before)


def _is_plainly_storable(given: Any) -> bool:
    """Whether a value has certainly no text that cannot be stored; much faster than a search for it."""
    try:
        return b"\\u0000" not in to_json(given)
    except (PydanticSerializationError, ValueError):
        return False


class ResponseModel(BaseModel):
    """What a client gets."""

    model_config = ConfigDict(protected_namespaces=(), defer_build=True)


class Frozen(BaseModel):
    """Values frozen at submission or at a claim and passed on in files: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)

    @classmethod
    def build_all(cls) -> None:
        """Builds all subclasses now, before this process is copied."""
        for each in cls.__subclasses__():
            each.model_rebuild()
            each.build_all()


class Page(ResponseModel, Generic[Item]):
    """One page of a list; request the next one with `after=<last_id>`."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
