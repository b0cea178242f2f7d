"""Redis and Valkey for tests: an operator's connection."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from uuid import uuid4

from redis.asyncio import Redis


class Found(NamedTuple):
    """One entry of a stream."""

    event_id: str
    body: bytes
    fields: dict[str, bytes]


class Desk:
    """Streams of a server, seen without Pillarbox."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def stream(self) -> str:
        """The name of a new stream; the first entry makes it."""
        return f"s{uuid4().hex[:10]}"

    async def count(self, stream: str) -> int:
        return int(await self.client.xlen(stream))

    async def read(self, stream: str) -> list[Found]:
        """All entries of a stream, from the first."""
        found = []
        for _, entry in await self.client.xrange(stream):
            fields = {name.decode(): value for name, value in entry.items()}
            found.append(Found(fields["event_id"].decode(), fields["payload"], fields))
        return found


@asynccontextmanager
async def desk(url: str, **settings: Any) -> AsyncIterator[Desk]:
    client = Redis.from_url(url, **settings)
    try:
        yield Desk(client)
    finally:
        await client.aclose()
