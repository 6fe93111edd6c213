"""Profiles of memory: those that there are, to look at and to forget."""

from typing import Annotated, Any

from fastapi import APIRouter, Path
from sqlalchemy import select

from app import profiles
from app.models import StoredProfile
from app.routes.dependencies import After, Limit, Reading, Writing
from app.routes.pages import page
from app.schemas.profile import Profile, Recipe
from app.schemas.wire import Answer, Page

router = APIRouter(prefix="/profiles", tags=["profiles"])

ProfileId = Annotated[str, Path(max_length=100, description="profile-…")]


class ProfileAnswer(Answer):
    """What is known of the memory of one model's training step."""

    id: str
    created_at: int
    model_name: str
    recipe: Recipe
    sequence: int
    torch_version: str
    profile: Profile


@router.get("", summary="Profiles, newest first")
def list_profiles(session: Reading, limit: Limit = 20, after: After = None) -> Page[ProfileAnswer]:
    return page(session, select(StoredProfile), StoredProfile.id, limit, after, _answer)


@router.get("/{profile_id}", summary="A profile")
def get(session: Reading, profile_id: ProfileId) -> ProfileAnswer:
    return _answer(profiles.get(session, profile_id))


@router.delete("/{profile_id}", status_code=204, summary="Forget a profile")
def delete(session: Writing, profile_id: ProfileId) -> None:
    """It is made anew when it is wanted again."""
    profiles.remove(session, profile_id)


def _answer(stored: StoredProfile) -> ProfileAnswer:
    fields: dict[str, Any] = {name: getattr(stored, name) for name in ("id", "model_name", "sequence")}
    return ProfileAnswer(
        **fields,
        created_at=int(stored.created_at),
        recipe=Recipe.model_validate(stored.recipe),
        torch_version=stored.torch_version,
        profile=Profile.model_validate(stored.content),
    )
