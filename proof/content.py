"""The content of events, and the fingerprint that ties a delivery to its witness."""

import hashlib
from typing import Any, Final

STREAM: Final = "proof"
QUEUE: Final = "proof-queue"
_TASK: Final = "task-"  # the prefix of the queue's keys


def keys_of(stream: str, count: int) -> list[str]:
    """The keys of one stream."""
    return [f"{_TASK if stream == QUEUE else 'key-'}{number}" for number in range(count)]


def stream_of(key: str) -> str:
    return QUEUE if key.startswith(_TASK) else STREAM


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fingerprint(key: str | None, payload: bytes, mark: str) -> str:
    """A hash of key, payload and the header "proof"."""
    return sha256_of(f"{key}\0{mark}\0".encode() + payload)


# Payloads that an outbox must take, because they are bytes.
_ODD: Final = (
    b"",
    b"\0",
    b"\xff\xfe invalid \xc3\x28",
    b"\xed\xa0\x80",
    b"[" * 10_000 + b"]" * 10_000,
    b'{"n": NaN}',
)
# Events that an outbox must refuse, as payload and fields. The writer's transaction goes on.
INVALID: Final[tuple[tuple[Any, dict[str, Any]], ...]] = (
    ({"n": float("nan")}, {}),
    ({"n": "\0"}, {}),
    ({"n": "\ud800"}, {}),
    ("\ud800", {}),
    (b"x" * 1_000_001, {}),
    (b"", {"key": "a\0b"}),
    (b"", {"headers": {"a": "\ud800"}}),
)
_EVERY: Final = 20  # one event of so many has an odd payload


def payload(n: int, size: int, fate: str) -> bytes:
    """The payload of the nth event of a key. Most are JSON."""
    if n % _EVERY == 0 and fate == "deliver":
        return _ODD[n // _EVERY % len(_ODD)]
    return f'{{"n": {n}, "pad": "'.encode() + b"x" * size + b'"}'
