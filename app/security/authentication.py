"""Authentication: which caller a request comes from."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from anyio import CapacityLimiter, to_thread
from starlette.datastructures import Headers
from starlette.requests import Request

from app.errors import Unauthorized
from app.security.keys import LOCAL, PREFIX, Caller, Keyring
from app.security.oidc import Provider
from app.security.rates import RateLimiter

_KEY_LOOKUPS = CapacityLimiter(4)
"""Separate threads, so that keys are looked up even if other requests occupy all shared ones."""

_TOKEN_CHECKS = CapacityLimiter(4)
"""Further threads, so that a provider that does not answer cannot hold up the lookup of keys."""

Authenticate = Callable[[Request], Awaitable[Caller]]
"""Returns the caller of a request, or raises `Unauthorized`."""


def by_key(keyring: Keyring, provider: Provider | None = None) -> Authenticate:
    """An `Authenticate` that identifies callers by their API keys, or by the tokens of a provider."""

    async def identify(request: Request) -> Caller:
        return await authenticate(request, keyring, provider)

    return identify


CALLER_KEY: ContextVar[str | None] = ContextVar("CALLER_KEY", default=None)
"""The id of the key that a request came with, for limits per key; None: without a key."""


async def admit(request: Request) -> Caller:
    """The caller of a request, if it has a valid key and is within its rate limit. The result is cached.

    Raises:
        Unauthorized: a key is needed, and the request has no valid one.
        TooManyRequests: the key has reached its rate limit.
    """
    known: Caller | None = getattr(request.state, "caller", None)
    if known is not None:
        CALLER_KEY.set(known.key_id)
        return known
    state = request.scope["app"].state
    identify: Authenticate = state.authenticate
    rates: RateLimiter = state.rates
    caller = await identify(request)
    request.state.caller = caller
    CALLER_KEY.set(caller.key_id)
    if caller.key_id is not None:
        await rates.count(caller.key_id)
    return caller


async def authenticate(request: Request, keyring: Keyring, provider: Provider | None = None) -> Caller:
    """Identifies the caller by the key or the token in `Authorization: Bearer`, or as the local user if there
    is no provider and no key was ever created.

    Raises:
        Unauthorized: a key or token is needed, and the request has no valid one.
        Forbidden, Unavailable: as `Provider.identify`.
    """
    key = bearer(request.headers)
    if provider is not None and not (key or "").startswith(PREFIX):
        return await _user(key, keyring, provider)
    if key is None or not key.startswith(PREFIX):
        closed = keyring.requires_key()
        if closed is None:
            closed = await to_thread.run_sync(keyring.read_requires_key, limiter=_KEY_LOOKUPS)
        if closed:
            raise Unauthorized(
                "A key is needed: send Authorization: Bearer ak_…, made with accrue keys create; the accrue "
                "command takes it from ACCRUE_API_KEY."
            )
        return LOCAL
    known, caller = keyring.cached(key)
    if not known:
        caller = await to_thread.run_sync(keyring.find, key, limiter=_KEY_LOOKUPS)
    if caller is None:
        raise Unauthorized(
            "This key is not valid: it is mistyped, revoked, expired, or belongs to another service."
        )
    return caller


async def _user(token: str | None, keyring: Keyring, provider: Provider) -> Caller:
    if token is None:
        raise Unauthorized("Sign in: send Authorization: Bearer with a token of the provider, or an API key.")
    known, caller = keyring.cached_user(token)
    if not known:
        caller = await to_thread.run_sync(
            lambda: keyring.find_user(provider.identify(token), token), limiter=_TOKEN_CHECKS
        )
    if caller is None:
        raise Unauthorized("Your access to this service was revoked: ask its operator.")
    return caller


def bearer(headers: Headers) -> str | None:
    """The bearer key in a request's headers, or None."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None
