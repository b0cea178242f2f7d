"""The identity of an outbox: its name for destinations that keep its progress."""

import re
import secrets
from collections.abc import Sequence
from typing import Final

from pillarbox.errors import ConfigError, StoreError

IDENTITY: Final = "identity"  # its name in the table or document that describes the outbox
_TEXT: Final = re.compile(r"[A-Za-z0-9_-]{1,60}")


def new_identity() -> str:
    """Random, so that two services on one Kafka never take each other for themselves."""
    return f"pillarbox-{secrets.token_hex(8)}"


def check_identity(identity: str) -> None:
    if not _TEXT.fullmatch(identity):
        raise ConfigError(f"identity {identity!r} cannot be used; use 1 to 60 letters, digits, '_' and '-'")


def has_owners(outbox: str, workers: Sequence[str]) -> StoreError:
    """The error for a new identity while workers own shards: they would go on with the old one."""
    return StoreError(
        f"{outbox} is served by {', '.join(workers)}; stop its relays, and wait until the lease of one that died has "
        "run out, before you change its identity"
    )
