"""UUIDv7, the identity of an event: ordered by time, so that a primary key grows at its end."""

import os
import threading
import time
from uuid import UUID

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
