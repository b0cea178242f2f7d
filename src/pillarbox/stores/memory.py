"""A store for tests, on SQLite in memory. It is gone when the process ends."""

from typing import Any, Self

from pillarbox.stores.sqlite import SqliteStore


class MemoryStore(SqliteStore):
    """An outbox in memory. Each object is an outbox of its own: the workers of a test share one."""

    def __init__(self, *, prefix: str = "outbox", shards: int = 16) -> None:
        super().__init__(":memory:", prefix=prefix, shards=shards)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """``memory:``"""
        return cls(**options)
