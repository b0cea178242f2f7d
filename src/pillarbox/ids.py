"""The identity of an event: UUIDv7, ordered by time, so that a primary key grows at its end; or one made from names."""

import json
import os
import threading
import time
from datetime import UTC, datetime
from enum import Enum
from typing import Final
from uuid import UUID, uuid5

from pillarbox.errors import InvalidEvent

# Never change it, nor the text that is hashed: old parts must give the same ids again.
_NAMESPACE: Final = UUID("b334476d-dfc9-4866-b2c6-2c845a210ed2")

_lock = threading.Lock()
_last = 0


def uuid7() -> UUID:
    """A UUIDv7 (RFC 9562) that is greater than every one this process made before, also when the clock steps back."""
    global _last
    # 48 bits of milliseconds and, in place of 12 random bits, the fraction of the millisecond.
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    stamp = milliseconds << 12 | (rest << 12) // 1_000_000
    with _lock:
        if stamp <= _last:
            stamp = _last + 1
        _last = stamp
    random = int.from_bytes(os.urandom(8)) & 0x3FFF_FFFF_FFFF_FFFF
    return UUID(int=(stamp >> 12) << 80 | 7 << 76 | (stamp & 0xFFF) << 64 | 0b10 << 62 | random)


def uuid7_floor(unix_seconds: float) -> UUID:
    """The lowest UUIDv7 of that instant: every id made by :func:`uuid7` before it is lower."""
    return UUID(int=max(0, int(unix_seconds * 1000)) << 80 | 7 << 76 | 0b10 << 62)


def stable_id(*parts: object) -> UUID:
    """The same id for the same parts, in every process and release: ``stable_id("page", page_id, revision_id)``.

    parts: identify the event; text, numbers, ids, instants, enumerations and other values with a text form. It is the
    text that counts: 7 and "7" are the same. Begin with a word that no other kind of event uses.
    """
    if not parts:
        raise InvalidEvent('stable_id was given nothing; name what identifies the event: stable_id("page", page_id)')
    return uuid5(_NAMESPACE, json.dumps([_text(part) for part in parts]))


def _text(part: object) -> str:
    if isinstance(part, Enum):
        part = part.value
    if isinstance(part, datetime) and part.utcoffset() is not None:
        part = part.astimezone(UTC)
    if part is None:
        # Usually a primary key that the database has not given yet: all such events would get one id.
        raise InvalidEvent("a part of stable_id is None; pass a value, and flush first if the database gives it")
    kind = type(part)
    if (kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__) or isinstance(part, type):
        raise InvalidEvent(f"a part of stable_id is a {kind.__name__}, which has no text of its own; pass its id")
    if isinstance(part, bytes | bytearray | memoryview | list | tuple | dict | set | frozenset):
        raise InvalidEvent(f"a part of stable_id is a {kind.__name__}; pass text, numbers and ids, each as a part")
    return str(part)
