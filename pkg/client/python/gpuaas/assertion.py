"""Assertions of a service account: JWTs (RFC 7519, RFC 7523) signed by Ed25519 (RFC 8037)."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Callable
from typing import Any, Final, Literal

GRANT_TYPE: Final[Literal["urn:ietf:params:oauth:grant-type:jwt-bearer"]] = (
    "urn:ietf:params:oauth:grant-type:jwt-bearer"
)
AUDIENCE = "gpuaas"
LIFE_SECONDS = 60


def signer(account_id: str, key_id: str, private_key_pem: str) -> Callable[[], str] | None:
    """Return what makes an assertion for one token; None without the package cryptography.

    A text that holds no Ed25519 key is a ValueError.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        return None
    try:
        loaded = load_pem_private_key(private_key_pem.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError("private_key_pem holds no key") from None
    if not isinstance(loaded, Ed25519PrivateKey):
        raise ValueError("private_key_pem holds no Ed25519 key")
    key: Ed25519PrivateKey = loaded

    def sign() -> str:
        now = int(time.time())
        claims = {
            "iss": account_id, "sub": account_id, "aud": AUDIENCE, "jti": str(uuid.uuid4()), "iat": now,
            "exp": now + LIFE_SECONDS,
        }
        signed = _part({"alg": "EdDSA", "kid": key_id, "typ": "JWT"}) + "." + _part(claims)
        return signed + "." + _base64(key.sign(signed.encode()))

    return sign


def _part(value: dict[str, Any]) -> str:
    return _base64(json.dumps(value, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
