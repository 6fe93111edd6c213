"""The signature of Standard Webhooks: HMAC-SHA256 over id, time and body.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import base64
import binascii
import hashlib
import hmac

from app.errors import BadSetting

_PREFIX = "whsec_"


def secret_bytes(secret: str) -> bytes:
    """The key that a `whsec_…` stands for.

    Raises:
        BadSetting: it is none, or shorter than 24 bytes.
    """
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(_PREFIX) or len(key) < 24:
        raise BadSetting(
            "ACCRUE_WEBHOOK_SECRET: whsec_ and the Base64 of at least 24 random bytes, as printed by "
            "echo whsec_$(head -c 32 /dev/urandom | base64)"
        )
    return key


def headers(key: bytes, identifier: str, at: int, body: bytes) -> dict[str, str]:
    """What a delivery carries."""
    signed = f"{identifier}.{at}.".encode() + body
    digest = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    return {
        "webhook-id": identifier,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{digest}",
        "Content-Type": "application/json",
        "User-Agent": "accrue",
    }
