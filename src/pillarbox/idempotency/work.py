"""The work that idempotency keys give to drivers, and its results."""

import hashlib
from enum import Enum
from typing import NamedTuple

from pillarbox.names import Names


class Key(NamedTuple):
    """One request's key, as the database knows it."""

    id: bytes  # SHA-256 of scope and key
    fingerprint: bytes  # SHA-256 of the request
    names: Names

    @property
    def lock(self) -> int:
        """The number of PostgreSQL's lock: another one in each outbox."""
        hashed = hashlib.sha256(self.id + self.names.parts["idempotency"].encode())
        return int.from_bytes(hashed.digest()[:8], "big", signed=True)


class Stored(NamedTuple):
    """The row of a key that is committed."""

    fingerprint: bytes
    status: int | None  # None: the request's transaction was committed by somebody else, without an answer
    headers: str | None
    body: bytes | None


class Claim(Enum):
    """The result of a claim that found no committed row."""

    NEW = "new"  # the row is written in this transaction: nobody else has the key
    BUSY = "busy"  # another transaction has it


class Answer(NamedTuple):
    """The answer to store."""

    key: Key
    status: int
    headers: str
    body: bytes
