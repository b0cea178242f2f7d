"""Signatures of Standard Webhooks: HMAC-SHA256 over the id, the time and the body. Pure."""

import hmac
from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from pillarbox.errors import ConfigError

_PREFIX: Final = "whsec_"
_LEAST_BYTES, _MOST_BYTES = 24, 64


@lru_cache(maxsize=4096)
def keys_of(secrets: tuple[str, ...]) -> tuple[bytes, ...]:
    """The keys of secrets such as ``whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw``. No error shows a part of one."""
    return tuple(map(_key, secrets))


def _key(secret: str) -> bytes:
    remedy = (
        f"write {_PREFIX} and {_LEAST_BYTES} to {_MOST_BYTES} random bytes in base64; in a URL write + as %2B, "
        "/ as %2F and = as %3D"
    )
    if not secret.startswith(_PREFIX):
        raise ConfigError(f"a secret for webhooks does not begin with {_PREFIX}; {remedy}")
    try:
        key = b64decode(secret.removeprefix(_PREFIX), validate=True)
    except ValueError:
        raise ConfigError(f"a secret for webhooks is not base64; {remedy}") from None
    if not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
        raise ConfigError(f"a secret for webhooks has {len(key)} bytes; {remedy}")
    return key


def signatures(keys: Sequence[bytes], id_: str, timestamp: int, body: bytes) -> str:
    """One signature for each key: a receiver accepts the message if one of them is right."""
    signed = b"%b.%d.%b" % (id_.encode(), timestamp, body)
    return " ".join("v1," + b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys)
