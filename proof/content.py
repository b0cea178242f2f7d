"""What an event of a run holds, and what a delivery must have in common with its witness."""

import hashlib
from typing import Any, Final

STREAM: Final = "proof"
QUEUE: Final = "proof-queue"
_TASK: Final = "task-"  # how the keys of the queue begin


def keys_of(stream: str, count: int) -> list[str]:
    """Keys that belong to one stream."""
    return [f"{_TASK if stream == QUEUE else 'key-'}{number}" for number in range(count)]


def stream_of(key: str) -> str:
    return QUEUE if key.startswith(_TASK) else STREAM


def fingerprint(key: str | None, payload: bytes, mark: str) -> str:
    """Of key, payload and the header "proof"."""
    return hashlib.sha256(f"{key}\0{mark}\0".encode() + payload).hexdigest()


# What an outbox takes as bytes, whatever a consumer makes of it.
_ODD: Final = (
    b"",
    b"\0",
    b"\xff\xfe invalid \xc3\x28",
    b"\xed\xa0\x80",
    b"[" * 10_000 + b"]" * 10_000,
    b'{"n": NaN}',
)
# What it refuses, in the transaction of the writer, which goes on: each is payload and fields.
INVALID: Final[tuple[tuple[Any, dict[str, Any]], ...]] = (
    ({"n": float("nan")}, {}),
    ({"n": "\0"}, {}),
    ({"n": "\ud800"}, {}),
    ("\ud800", {}),
    (b"x" * 1_000_001, {}),
    (b"", {"key": "a\0b"}),
    (b"", {"headers": {"a": "\ud800"}}),
)
_EVERY: Final = 20  # one in so many of a key is an odd one


def payload(n: int, size: int, fate: str) -> bytes:
    """Of the nth event of a key: JSON for the most part."""
    if n % _EVERY == 0 and fate == "deliver":
        return _ODD[n // _EVERY % len(_ODD)]
    return f'{{"n": {n}, "pad": "'.encode() + b"x" * size + b'"}'
