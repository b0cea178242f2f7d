"""Serialises a Python value to the bytes that are delivered, once. Pure."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from typing import Any, Final, TypeAlias
from uuid import UUID

from pillarbox.errors import InvalidEvent

# Given a value that a payload has: plain data in its place. Raises TypeError for a value that it does not know.
Encoder: TypeAlias = Callable[[Any], Any]

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
BYTES: Final = "application/octet-stream"
MAX_DEPTH: Final = 200

_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_NOT_FINITE: Final = "JSON compliant"  # as in the encoder's own error
_BRACKETS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def serialise(payload: Any, encoder: Encoder | None = None) -> tuple[bytes, str]:
    """The bytes and their content type: bytes and str as they are, everything else as JSON. encoder: asked first about
    values that JSON does not have.

    Refuses what a consumer could not read back: NaN and infinity, NUL, lone surrogates, nesting deeper than 200.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload), BYTES
    if isinstance(payload, str):
        if "\0" in payload:
            raise InvalidEvent("the payload contains a NUL character; remove it, or pass the payload as bytes")
        return _encode(payload), TEXT
    try:
        text = _json_encoder(encoder).encode(payload)
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, ValueError) as error:
        at = _place(payload, _json_encoder(encoder))
        # The encoder's own text may quote the value.
        if _NOT_FINITE in str(error):
            raise InvalidEvent(
                f"the payload contains NaN or infinity{at}, which JSON cannot hold; use null or text"
            ) from None
        if "Circular" in str(error):
            raise InvalidEvent("the payload contains itself; pass plain data") from None
        reason = str(error) if isinstance(error, TypeError) else type(error).__name__
        raise InvalidEvent(
            f"the payload cannot be written as JSON{at} ({reason}); pass plain data or bytes, or give "
            "the outbox an encoder"
        ) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise _too_deep()
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidEvent("the payload contains a NUL character, which databases refuse in JSON; remove it")
    return _encode(text), JSON


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidEvent(
            "the payload contains a lone surrogate, which is no character; decode the text again, or pass bytes"
        ) from None


def _too_deep() -> InvalidEvent:
    return InvalidEvent(f"the payload is nested deeper than {MAX_DEPTH}; flatten it, or pass bytes")


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        if match[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in "]}":
            depth -= 1
    return deepest


def _default(value: Any) -> Any:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(_NOT_FINITE)
        return str(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    # Models of Pydantic, msgspec and the like, recognised by their methods, so that none is imported.
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
        return dump(mode="json")
    if hasattr(value, "__struct_fields__") and not isinstance(value, type):
        return sys.modules["msgspec"].to_builtins(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


# Made once: json.dumps with options makes an encoder for every call.
@cache
def _json_encoder(own: Encoder | None) -> json.JSONEncoder:
    default = _default if own is None else partial(_default_after, own)
    return json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default)


def _default_after(own: Encoder, value: Any) -> Any:
    try:
        return own(value)
    except TypeError:  # it leaves this value to us
        return _default(value)


def _place(value: Any, encoder: json.JSONEncoder, before: str = "") -> str:
    """Where the value is that cannot be written, such as `` at items[0].price``; empty: the payload itself."""
    with suppress(TypeError, ValueError):
        if not isinstance(value, dict | list | tuple | str | int | float | None):
            value = encoder.default(value)
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside = [(f"{before}.{_shown(name)}" if before else _shown(name), each) for name, each in value.items()]
    elif isinstance(value, list | tuple):
        inside = [(f"{before}[{number}]", each) for number, each in enumerate(value)]
    for place, each in inside:
        try:
            encoder.encode(each)
        except RecursionError:
            break
        except (TypeError, ValueError):
            return _place(each, encoder, place)
    return f" at {before}" if before else ""


def _shown(name: object) -> str:
    """The name of a field; other keys may be data."""
    return name if isinstance(name, str) and name.isidentifier() and len(name) <= 100 else "..."
