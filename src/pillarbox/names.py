"""The names of an outbox's tables and indexes, all from one prefix."""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

from pillarbox.errors import ConfigError

# Tables of all databases; each database has some of them.
TABLES = (
    *("meta", "event", "stream", "worker", "lease", "held_key", "dead_letter", "audit", "sleeper", "key_lock"),
    *("inbox", "inbox_version", "idempotency", "consumer"),
)
_INDEXES = (
    *("ready_index", "held_index", "due_index", "leased_index", "held_due_index", "dead_index", "aggregate_index"),
    *("inbox_age_index", "idempotency_age_index", "replay_index"),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")


@dataclass(frozen=True)
class Names:
    """``prefix`` starts every table's name; ``schema`` is the database schema they stand in, if it has schemas."""

    prefix: str = "outbox"
    schema: str | None = None

    def __post_init__(self) -> None:
        for setting, value in (("prefix", self.prefix), ("schema", self.schema)):
            if value is not None and not _NAME.fullmatch(value):
                raise ConfigError(
                    f"{setting} {value!r} cannot name a table; use at most 40 letters, digits and _, and no digit first"
                )

    @cached_property
    def parts(self) -> dict[str, str]:
        """The values of a statement's placeholders."""
        before = f"{self.schema}." if self.schema else ""
        parts = {name: f"{before}{self.prefix}_{name}" for name in (*TABLES, "wake", "event_seq")}
        parts |= {name: f"{self.prefix}_{name.removesuffix('_index')}" for name in (*_INDEXES, "wake_trigger")}
        # A hash: PostgreSQL refuses a channel's name of more than 63 bytes, in the INSERT of a writer.
        place = f"{self.schema or 'public'}.{self.prefix}"
        return parts | {"channel": f"pillarbox_{hashlib.sha256(place.encode()).hexdigest()[:32]}"}
