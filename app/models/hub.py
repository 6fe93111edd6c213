"""Models of the hub: their config.json, from its cache or by a request, pinned to a commit."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from app.contract.model_reference import split_revision
from app.errors import TooManyRequests, Unprocessable
from app.hub import client
from app.security.authentication import CALLER_KEY
from app.settings import Settings

LARGEST_CONFIG_BYTES = 2**20

_TIMEOUT_SECONDS = 5.0
"""The time limit for the whole response."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FIELD = "model_name"

_AT_ONCE, _AT_ONCE_PER_KEY = 16, 2
_WAIT_SECONDS = 5.0
_look_ups: Counter[str | None] = Counter()
_changed = threading.Condition()
"""Limits look-ups on the hub, each of which blocks one of the service's forty threads."""


@contextmanager
def _one_of_few() -> Iterator[None]:
    """Waits for one of the few slots for look-ups, of which each key gets at most two.

    Raises:
        TooManyRequests: the key has two look-ups already, or no slot became free in time.
    """
    key = CALLER_KEY.get()

    def may_start() -> bool:
        return _look_ups[key] < _AT_ONCE_PER_KEY and _look_ups.total() < _AT_ONCE

    with _changed:
        if not _changed.wait_for(may_start, 0 if _look_ups[key] >= _AT_ONCE_PER_KEY else _WAIT_SECONDS):
            raise TooManyRequests(
                "Several models are being looked up on the hub already: try again in a moment.",
                retry_after_seconds=5,
            )
        _look_ups[key] += 1
    try:
        yield
    finally:
        with _changed:
            _look_ups[key] -= 1
            if not _look_ups[key]:
                del _look_ups[key]
            _changed.notify_all()


class FoundConfig(NamedTuple):
    content: bytes
    """Of config.json, up to one byte more than it may have."""
    commit: str | None
    """The commit that it belongs to, if the hub says so."""


class NotOnHub(Exception):
    """The hub does not provide the model; the message continues "The model … is not on this machine, ".

    Args:
        has_answered: whether the hub has answered.
    """

    def __init__(self, why: str, *, has_answered: bool = True) -> None:
        super().__init__(why)
        self.has_answered = has_answered


class NotReadable(Unprocessable):
    """A model may exist, but its config.json cannot be read from here: the hub cannot be reached, or requires
    that its conditions be accepted first."""


def cached(name: str) -> FoundConfig | None:
    """The config.json in the hub's cache on this machine, or None.

    Raises:
        OSError: it cannot be read.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    plain, revision = split_revision(name)
    try:
        path = try_to_load_from_cache(plain, "config.json", revision=revision)
    except HFValidationError:
        return None
    if not isinstance(path, str):
        return None
    with Path(path).open("rb") as file:
        return FoundConfig(file.read(LARGEST_CONFIG_BYTES + 1), _commit(Path(path).parent.name))


def fetch(name: str, settings: Settings) -> FoundConfig:
    """Fetches a config.json, without retries and with a short timeout, since a user waits.

    Raises:
        NotOnHub: the hub cannot be reached, or does not provide it; the message says why and what to do.
        NotReadable: the model's conditions were not accepted.
        Unprocessable: there is no such revision or no config.json, or the hub rejects this machine's token.
        TooManyRequests: many look-ups are running.
    """
    if settings.offline:
        raise NotOnHub("and ACCRUE_OFFLINE forbids a request to the hub", has_answered=False)
    from huggingface_hub import get_token, hf_hub_url
    from huggingface_hub.errors import HFValidationError

    plain, revision = split_revision(name)
    try:
        url = hf_hub_url(plain, "config.json", revision=revision)
    except HFValidationError:
        raise NotOnHub("and it is not a valid name on the hub") from None
    token = get_token()  # this machine's, if it has one
    try:
        with _one_of_few():
            status, headers, content = client.get(
                url, token, most_bytes=LARGEST_CONFIG_BYTES, seconds=_TIMEOUT_SECONDS
            )
    except client.HubNotAnswered as error:
        raise NotOnHub(f"and the hub {error}", has_answered=False) from None
    if status != HTTPStatus.OK:
        raise _refused(name, status, headers.get("x-error-code", ""), has_token=token is not None)
    return FoundConfig(content, _commit(headers.get("x-repo-commit", "")))


def _commit(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None


def _refused(name: str, status: int, code: str, *, has_token: bool) -> Exception:
    """The error that the hub's answer means, by its status and its X-Error-Code."""
    from huggingface_hub import constants

    plain, revision = split_revision(name)
    page = f"{constants.ENDPOINT}/{plain}"
    if code == "GatedRepo":
        token = "the account of HF_TOKEN" if has_token else "your account, and set HF_TOKEN to its token"
        why = f"The model {plain} is gated: accept its conditions at {page} with {token}."
        return NotReadable(why, field=_FIELD)
    if code == "RevisionNotFound":
        why = f"The model {plain} has no revision {revision or 'main'}: {page}/tree/main lists its branches."
    elif code == "EntryNotFound":
        why = f"The model {plain} has no config.json on the hub, so it is not a model of transformers."
    elif status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) and code != "RepoNotFound" and has_token:
        why = (
            f"The hub rejects this machine's token (HF_TOKEN) for the model {plain}: check that it is valid "
            "and may read the model."
        )
    elif status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
        token = "the account of HF_TOKEN may not read it" if has_token else "HF_TOKEN is not set"
        return NotOnHub(f"and the hub has no such model, or it is private and {token}")
    else:
        return NotOnHub(f"and the hub answers {status}")
    return Unprocessable(why, field=_FIELD)
