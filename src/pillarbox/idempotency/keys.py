"""Idempotency keys: reads the header, and identifies a key and a request. Pure."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final

from pillarbox.errors import ConfigError
from pillarbox.idempotency.reply import MALFORMED, Refused

HEADER: Final = "idempotency-key"
_PRINTABLE: Final = re.compile(r"[\x20-\x7e]{1,255}")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')  # a string of RFC 8941
_ESCAPED: Final = re.compile(r'\\(["\\])')


def parsed(values: Sequence[str]) -> str | None:
    """The key in the header's values, quoted or bare; None: there is no header. Raises Refused with status 400."""
    if not values:
        return None
    key = values[0].strip(" \t")
    if key.startswith('"'):
        quoted = _QUOTED.fullmatch(key)
        key = _ESCAPED.sub(r"\1", quoted[1]) if quoted else ""
    if len(values) > 1 or not _PRINTABLE.fullmatch(key):
        raise Refused(MALFORMED)
    return key


def checked_scope(scope: Any) -> str | None:
    if scope is not None and not isinstance(scope, str):
        raise ConfigError(
            f"scope returned a value of type {type(scope).__name__}; return text that names the caller, or None for a "
            "request without a key"
        )
    return scope


def digest(*parts: bytes) -> bytes:
    """SHA-256 of the parts; their lengths keep ("ab", "c") apart from ("a", "bc")."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.digest()
