"""The kinds of object that Accrue's schemas are made of."""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Strict

Flag = Annotated[bool, Strict()]
"""true or false: neither 1 nor "yes"."""

Item = TypeVar("Item")


class Request(BaseModel):
    """What a client sends: an unknown field is refused by name, and infinity and NaN are no numbers."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, validate_by_name=True, protected_namespaces=()
    )


class Answer(BaseModel):
    """What a client gets."""

    model_config = ConfigDict(protected_namespaces=())


class Frozen(BaseModel):
    """What is fixed at submission or at a claim and travels through files: immutable, no surplus fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Page(Answer, Generic[Item]):
    """One page of a list, newest first; ask for the next with `after=<last_id>`."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
