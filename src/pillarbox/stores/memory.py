"""A store that is gone when the process ends, for tests: SQLite in memory, so that it behaves like a database."""

from typing import Any, Self

from pillarbox.stores.sqlite import SqliteStore


class MemoryStore(SqliteStore):
    """Share one object between the workers of a test: another one would be another outbox."""

    def __init__(self, *, prefix: str = "outbox", shards: int = 16) -> None:
        super().__init__(":memory:", prefix=prefix, shards=shards)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """``memory:``"""
        return cls(**options)
