"""Models of the hub: their config.json, from its cache or by a request, pinned to a commit."""

import asyncio
import re
import threading
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from app.contract.model_reference import split_revision
from app.errors import TooManyRequests, Unprocessable
from app.settings import Settings

LARGEST_CONFIG_BYTES = 2**20

_TIMEOUT_SECONDS = 5.0
"""The time limit for the whole response."""
_REDIRECTS = 5
_BLOCK_BYTES = 2**14
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FIELD = "model_name"

_looking_up = threading.BoundedSemaphore(8)
"""Limits concurrent look-ups on the hub: each blocks one of the service's forty threads."""


class FoundConfig(NamedTuple):
    content: bytes
    """Of config.json, up to one byte more than it may have."""
    commit: str | None
    """The commit that it belongs to, if the hub says so."""


class NotOnHub(Exception):
    """The hub does not give the model; the message continues "The model … is not on this machine, "."""


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
        NotOnHub: the hub cannot be asked, or does not give it; the message says why and what to do.
        TooManyRequests: many look-ups are running.
    """
    if settings.offline:
        raise NotOnHub("and ACCRUE_OFFLINE forbids a request to the hub")
    import httpx2 as httpx
    from huggingface_hub import get_token, hf_hub_url
    from huggingface_hub.errors import HFValidationError

    plain, revision = split_revision(name)
    try:
        url = hf_hub_url(plain, "config.json", revision=revision)
    except HFValidationError:
        raise NotOnHub("and it is not a valid name on the hub") from None
    if not _looking_up.acquire(blocking=False):
        raise TooManyRequests(
            "Many models are being looked up on the hub already: try again in a moment.",
            retry_after_seconds=5,
        )
    token = get_token()  # this machine's, if it has one
    try:
        status, headers, content = asyncio.run(_fetched(url, token))
    except TimeoutError:
        raise NotOnHub("and the hub answers too slowly") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        raise NotOnHub("and the hub cannot be reached from here") from None
    finally:
        _looking_up.release()
    if status != HTTPStatus.OK:
        raise _refused(name, status, headers.get("x-error-code", ""), has_token=token is not None)
    return FoundConfig(content, _commit(headers.get("x-repo-commit", "")))


def _commit(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None


async def _fetched(url: str, token: str | None) -> tuple[int, Mapping[str, str], bytes]:
    """The status, headers and content of an answer, up to the largest size that is accepted.

    Raises:
        TimeoutError: name look-up, redirects, headers and content together take too long.
    """
    import httpx2 as httpx

    sent, content = {"Authorization": f"Bearer {token}"} if token else None, b""
    async with (
        asyncio.timeout(_TIMEOUT_SECONDS),
        httpx.AsyncClient(follow_redirects=True, max_redirects=_REDIRECTS) as client,
        client.stream("GET", url, headers=sent, timeout=_TIMEOUT_SECONDS) as answer,
    ):
        if answer.status_code == HTTPStatus.OK:
            async for block in answer.aiter_bytes(_BLOCK_BYTES):
                content += block
                if len(content) > LARGEST_CONFIG_BYTES:
                    break  # it is refused later
        return answer.status_code, dict(answer.headers), content


def _refused(name: str, status: int, code: str, *, has_token: bool) -> Exception:
    """The error that the hub's answer means, by its status and its X-Error-Code."""
    from huggingface_hub import constants

    plain, revision = split_revision(name)
    page = f"{constants.ENDPOINT}/{plain}"
    if code == "GatedRepo":
        token = "the account of HF_TOKEN" if has_token else "your account, and set HF_TOKEN to its token"
        why = f"The model {plain} is gated: accept its conditions at {page} with {token}."
    elif code == "RevisionNotFound":
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
