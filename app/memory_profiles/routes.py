"""Routes to list, read and delete memory profiles."""

from typing import Annotated, Any

from fastapi import Path
from sqlalchemy import select

from app.contract.base import Page, ResponseModel
from app.contract.memory_profile import Profile, Recipe
from app.errors import Forbidden
from app.memory_profiles import profiles
from app.security.keys import Caller
from app.storage.tables import StoredProfile
from app.web.dependencies import AfterProfile, CurrentCaller, Limit, Reading, Writing
from app.web.pagination import page
from app.web.routers import native_router
from app.web.session_route import SessionRoute

router = native_router("/profiles", tags=["profiles"], route_class=SessionRoute)

ProfileId = Annotated[str, Path(max_length=100, description="profile-…")]


class ProfileResponse(ResponseModel):
    """What is known of the memory of one model's training step."""

    id: str
    created_at: int
    model_name: str
    recipe: Recipe
    sequence: int
    torch_version: str
    profile: Profile


@router.get("", summary="Profiles, newest first")
def list_profiles(
    session: Reading, caller: CurrentCaller, limit: Limit = 20, after: AfterProfile = None
) -> Page[ProfileResponse]:
    """Lists the profiles of all keys' models. Requires the scope admin."""
    _check(caller)
    return page(session, select(StoredProfile), StoredProfile.id, limit, after, _answer)


@router.get("/{profile_id}", summary="A profile")
def get(session: Reading, caller: CurrentCaller, profile_id: ProfileId) -> ProfileResponse:
    """Requires the scope admin."""
    _check(caller)
    return _answer(profiles.get(session, profile_id))


@router.delete("/{profile_id}", status_code=204, summary="Delete a profile")
def delete(session: Writing, caller: CurrentCaller, profile_id: ProfileId) -> None:
    """Deletes a profile; the next request for it makes a new one. Requires the scope admin."""
    _check(caller)
    profiles.remove(session, profile_id)


def _check(caller: Caller) -> None:
    """Checks that the caller is an admin, since profiles reveal the models of other keys.

    Raises:
        Forbidden: the caller's key does not have the scope admin.
    """
    if not caller.may("admin"):
        raise Forbidden("Profiles are shared by all keys: reading them requires the scope admin.")


def _answer(stored: StoredProfile) -> ProfileResponse:
    fields: dict[str, Any] = {name: getattr(stored, name) for name in ("id", "model_name", "sequence")}
    return ProfileResponse(
        **fields,
        created_at=int(stored.created_at),
        recipe=Recipe.model_validate(stored.recipe),
        torch_version=stored.torch_version,
        profile=Profile.model_validate(stored.content),
    )
