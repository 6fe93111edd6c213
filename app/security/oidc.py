"""Single sign-on: identifies users by the tokens of an OpenID Connect provider.

A token is a JWT (RFC 7519) that the provider has signed for this service; PyJWT checks it against the keys
that the provider publishes (OpenID Connect Discovery 1.0, section 4). Each user has a row among the keys, so
that jobs, quotas, usage and limits belong to users as they belong to keys.
"""

import hashlib
import json
import re
import threading
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import structlog

from app.contract.text import storable
from app.errors import BadSetting, Forbidden, Unauthorized, Unavailable
from app.security.scopes import Scope
from app.settings import LOOPBACK, Settings

log = structlog.get_logger("accrue.sso")

_ALGORITHMS = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",), ("EC", "P-384"): ("ES384",), ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",), ("OKP", "Ed448"): ("EdDSA",),
}  # fmt: skip
"""What keys may sign with, by their type and curve (RFC 7518, RFC 8037). None of them uses a shared
secret: anyone who can verify such a token could also forge one."""

_FORM = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_MAX_LENGTH = 16 * 2**10
_LEEWAY_SECONDS = 30
"""How far the clocks of the provider and of this machine may be apart."""
_LONGEST_SECONDS = 7 * 24 * 3600.0
"""How long a token may be valid from now on. A user who leaves a group keeps its rights until then."""

_FRESH_SECONDS = 3600.0
"""After this time, the provider's keys are read again."""
_TRUSTED_SECONDS = 24 * 3600.0
"""After this time, keys are not used any more if they could not be read again: they may have been
withdrawn."""
_RETRY_SECONDS = 30.0
"""How often they are read at most, if a token names an unknown one or the provider cannot be reached."""
_TIMEOUT_SECONDS = 5.0
_MAX_BYTES = 2**20

_NAMES = ("email", "preferred_username", "name", "sub")
"""The claims that may name a user, the preferred one first."""

USER_PREFIX = "user-"
"""How the ids of users begin; those of keys begin with key-."""


@dataclass(frozen=True)
class Identity:
    """A user, as a valid token describes it."""

    id: str
    """Derived from the issuer and the subject, which together identify a user (OpenID Connect Core 1.0,
    section 2)."""
    name: str
    scopes: tuple[Scope, ...]


def is_token(text: str) -> bool:
    """Whether a text has the form of a JWT."""
    return len(text) <= _MAX_LENGTH and _FORM.fullmatch(text) is not None


class Provider:
    """The OpenID Connect provider of the settings."""

    def __init__(self, issuer: str, audience: str, settings: Settings) -> None:
        """
        Raises:
            BadSetting: PyJWT is not installed.
        """
        try:
            import jwt  # noqa: F401
        except ImportError:
            raise BadSetting("ACCRUE_OIDC_ISSUER needs PyJWT: pip install 'accrue[oidc]'") from None
        self._issuer, self._audience = issuer, audience
        self._group, self._admins = settings.oidc_group, settings.oidc_admin_group
        self._groups_claim = settings.oidc_groups_claim
        self._lock = threading.Lock()
        self._keys: dict[str | None, _PublicKey] = {}
        self._read_at = self._tried_at = float("-inf")

    def identify(self, token: str) -> Identity:
        """The user of a token. May read the provider's keys, which takes up to ten seconds.

        Raises:
            Unauthorized: the token is not valid; the message says why.
            Forbidden: the user is not in the group that may use the service.
            Unavailable: the provider's keys cannot be read.
        """
        import jwt

        if not is_token(token):
            raise Unauthorized("This token is not valid: send an ID token of the provider, or an API key.")
        try:
            key = self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token, key=key.key, algorithms=list(key.algorithms), audience=self._audience,
                issuer=self._issuer, leeway=_LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )  # fmt: skip
        except jwt.ExpiredSignatureError:
            raise Unauthorized("This token has expired: sign in again.") from None
        except jwt.InvalidAudienceError:
            raise Unauthorized("This token is for another service: its audience is not this one.") from None
        except jwt.InvalidIssuerError:
            raise Unauthorized(f"This token is not of the issuer {self._issuer}.") from None
        except jwt.PyJWTError:
            raise Unauthorized("This token is not valid: its form or its signature is wrong.") from None
        if claims["exp"] > time.time() + _LONGEST_SECONDS:
            raise Unauthorized("This token is valid for longer than a week, which is not accepted.")
        if not claims["sub"]:
            raise Unauthorized("This token is not valid: it names no user.")
        return self._identity(claims)

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        listed = claims.get(self._groups_claim)
        listed = [listed] if isinstance(listed, str) else listed if isinstance(listed, list) else []
        groups = {each for each in listed if isinstance(each, str)}
        is_admin = self._admins is not None and self._admins in groups
        if self._group is not None and self._group not in groups and not is_admin:
            raise Forbidden(f"Your account may not use this service: it is not in the group {self._group}.")
        digest = hashlib.sha256(json.dumps([self._issuer, str(claims["sub"])]).encode()).hexdigest()
        scopes: tuple[Scope, ...] = ("read", "write", "admin") if is_admin else ("read", "write")
        return Identity(f"{USER_PREFIX}{digest[:26]}", _name_of(claims), scopes)

    def _key(self, name: str | None) -> "_PublicKey":
        """The provider's key of that name, read again if it is unknown or old.

        Raises:
            Unauthorized: the provider has no such key.
            Unavailable: its keys cannot be read.
        """
        if time.monotonic() > self._read_at + _TRUSTED_SECONDS:
            self._keys = {}
        with self._lock:
            if not self._keys and self._may_read(name):
                self._read()  # others wait for the first keys
        with self._lock:
            reads = self._may_read(name)
        if reads:
            self._read()  # meanwhile, others use the known keys
        found = self._find(name)
        if found is None and not self._keys:
            raise Unavailable("The keys of the sign-in provider cannot be read: try again in a minute.")
        if found is None:
            raise Unauthorized("This token is not valid: the provider has no key of the name that it gives.")
        return found

    def _may_read(self, name: str | None) -> bool:
        """Whether the keys should be read now; only the first of several callers should."""
        now = time.monotonic()
        is_due = now > self._read_at + _FRESH_SECONDS or self._find(name) is None
        if not is_due or now < self._tried_at + _RETRY_SECONDS:
            return False
        self._tried_at = now
        return True

    def _find(self, name: str | None) -> "_PublicKey | None":
        if name is None and len(self._keys) == 1:  # the name is optional if there is one key
            return next(iter(self._keys.values()))
        return self._keys.get(name)

    def _read(self) -> None:
        """Reads the keys. If that fails, the known ones stay."""
        try:
            self._keys = self.published_keys()
        except Unavailable as error:
            log.warning(
                "the sign-in provider's keys cannot be read", issuer=self._issuer, error=error.message
            )
            return
        self._read_at = time.monotonic()

    def published_keys(self) -> "dict[str | None, _PublicKey]":
        """The provider's keys by their names.

        Raises:
            Unavailable: they cannot be read; the message says why.
        """
        try:
            document = _get(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
            if document["issuer"] != self._issuer:
                raise ValueError(f"it calls itself {str(document['issuer'])[:100]!r}")
            listed = [each for each in _get(document["jwks_uri"])["keys"] if isinstance(each, dict)]
        except Exception as error:  # whatever the provider sends
            why = str(error)[:300] or type(error).__name__
            raise Unavailable(f"The keys of {self._issuer} cannot be read: {why}.") from None
        found = {each.get("kid"): _public_key(each) for each in listed if each.get("use", "sig") == "sig"}
        return {name: key for name, key in found.items() if key is not None}


@dataclass(frozen=True)
class _PublicKey:
    key: Any
    algorithms: tuple[str, ...]
    """What it may sign with."""


def _public_key(described: Mapping[str, Any]) -> _PublicKey | None:
    """A key of the provider (RFC 7517); None if it cannot check signatures."""
    import jwt

    kind, named = described.get("kty"), described.get("alg")
    possible = _ALGORITHMS.get((str(kind), described.get("crv") if kind != "RSA" else None), ())
    algorithms = possible if named is None else tuple(each for each in possible if each == named)
    if not algorithms:
        return None
    try:
        return _PublicKey(jwt.PyJWK.from_dict(dict(described), algorithms[0]).key, algorithms)
    except jwt.PyJWTError:
        return None


def _name_of(claims: Mapping[str, Any]) -> str:
    """How a user is shown, without characters that would control a terminal. Users can often choose it."""
    known = [each for each in _NAMES if isinstance(claims.get(each), str) and claims[each].strip()]
    if claims.get("email_verified") is False and "email" in known:
        known.remove("email")
    plain = "".join(" " if unicodedata.category(each) in _UNPRINTABLE else each for each in claims[known[0]])
    return storable(plain)[:100]


_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def _get(url: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: there is none, or the address is neither https nor of this machine.
        httpx.HTTPError: the server does not answer.
    """
    import httpx2 as httpx

    check_address(url)
    content = bytearray()
    ends = time.monotonic() + _TIMEOUT_SECONDS
    with httpx.stream("GET", url, timeout=_TIMEOUT_SECONDS) as answer:
        answer.raise_for_status()
        for block in answer.iter_bytes():
            content += block
            if len(content) > _MAX_BYTES or time.monotonic() > ends:
                raise ValueError("the answer is too large or too slow")
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("the answer is no JSON object")
    return found


def check_address(url: str) -> None:
    """Checks that others on the network cannot replace what an address returns.

    Raises:
        ValueError: it is neither https nor of this machine.
    """
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        raise ValueError(f"{url[:200]} is not an https:// address")


def provider_of(settings: Settings) -> Provider | None:
    """The provider of the settings; None if there is none.

    Raises:
        BadSetting: settings are missing or contradictory, or PyJWT is not installed.
    """
    issuer, audience = settings.oidc_issuer, settings.oidc_audience
    if issuer is None:
        if audience or settings.oidc_group or settings.oidc_admin_group:
            raise BadSetting("ACCRUE_OIDC_ISSUER is not set, although other ACCRUE_OIDC_… settings are.")
        return None
    if not audience:
        raise BadSetting(
            "ACCRUE_OIDC_ISSUER needs ACCRUE_OIDC_AUDIENCE: the client id of this service at the provider. "
            "Otherwise, tokens that were issued for other services would be accepted."
        )
    try:
        check_address(issuer)
    except ValueError as error:
        raise BadSetting(f"ACCRUE_OIDC_ISSUER: {error}.") from None
    return Provider(issuer, audience, settings)
