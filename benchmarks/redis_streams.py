"""The streams of a run on Valkey."""

import uuid
from typing import Any

from redis import Redis

from servers import Valkey


class RedisStreams:
    """Streams of a server that syncs its append-only file before it confirms."""

    def __init__(self, server: Valkey) -> None:
        self._server = server
        self._client: Any = Redis.from_url(server.url)  # half of it has no types

    @property
    def servers(self) -> str:
        return self._server.url

    def topic(self, name: str) -> str:
        """A new name; the first entry makes the stream."""
        return f"{name}-{uuid.uuid4().hex[:6]}"

    def messages(self, name: str) -> int:
        """The number of entries in a stream. Nothing is taken out while it is measured."""
        return int(self._client.xlen(name))

    def drop_topic(self, name: str) -> None:
        self._client.delete(name)
