"""Base classes of Accrue's schemas."""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Strict, model_validator
from pydantic_core import PydanticCustomError

from app.contract.text import path_to_unstorable, size_error

Flag = Annotated[bool, Strict()]
"""A strict boolean: true or false, but not 1 or "yes"."""

UNSTORABLE = "unstorable_text"
"""The error type for text that cannot be stored; the error's context names the field."""

Item = TypeVar("Item")


class Request(BaseModel):
    """What a client sends. Unknown fields are rejected by name; infinity and NaN are rejected as numbers."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, validate_by_name=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _can_be_stored(cls, given: Any) -> Any:
        """Runs before all validation, so that no field needs its own check; the error names the field."""
        if (why := size_error(given)) is not None:
            raise PydanticCustomError("too_large", "the request {why}", {"why": why})
        if (path := path_to_unstorable(given)) is not None:
            raise PydanticCustomError(
                UNSTORABLE, "has a NUL character or a lone surrogate", {"field": ".".join(path)}
            )
        return given


class Answer(BaseModel):
    """What a client gets."""

    model_config = ConfigDict(protected_namespaces=())


class Frozen(BaseModel):
    """Values frozen at submission or at a claim and passed on in files: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Page(Answer, Generic[Item]):
    """One page of a list, newest first; ask for the next with `after=<last_id>`."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
