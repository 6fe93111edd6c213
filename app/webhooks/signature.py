"""Signatures of Standard Webhooks (standardwebhooks.com)."""

import base64
import binascii
from datetime import UTC, datetime

from standardwebhooks import Webhook

from app.errors import BadSetting

_PREFIX = "whsec_"
_LEAST_BYTES = 24


def signer(secret: str) -> Webhook:
    """A signer for a secret `whsec_…`.

    Raises:
        BadSetting: the secret is invalid, or shorter than 24 bytes.
    """
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(_PREFIX) or len(key) < _LEAST_BYTES:
        raise BadSetting(
            "ACCRUE_WEBHOOK_SECRET must be whsec_ followed by the Base64 of at least 24 random bytes, "
            "as printed by "
            "echo whsec_$(head -c 32 /dev/urandom | base64)"
        )
    return Webhook(key)


def headers(signing: Webhook, identifier: str, body: bytes) -> dict[str, str]:
    """The headers of a delivery."""
    now = datetime.now(UTC)
    return {
        "webhook-id": identifier,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": signing.sign(identifier, now, body.decode()),
        "Content-Type": "application/json",
        "User-Agent": "accrue",
    }
