"""NATS for tests: an operator's connection."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote
from uuid import uuid4

import nats
from nats.aio.client import Client
from nats.js.api import StreamConfig


class Found(NamedTuple):
    """One message in a stream."""

    event_id: str
    subject: str
    body: bytes
    headers: dict[str, str]


class Desk:
    """Streams and messages of a server, seen without Pillarbox."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.manager = client.jsm()

    async def stream(self, *subjects: str, **settings: Any) -> str:
        """A new stream; without subjects it takes one of its own name."""
        name = f"s{uuid4().hex[:10]}"
        await self.manager.add_stream(StreamConfig(name=name, subjects=list(subjects) or [name], **settings))
        return name

    async def count(self, stream: str) -> int:
        return int((await self.manager.stream_info(stream)).state.messages)

    async def read(self, stream: str) -> list[Found]:
        """All messages of a stream, from the first."""
        state = (await self.manager.stream_info(stream)).state
        found = []
        for number in range(max(1, state.first_seq), state.last_seq + 1):
            message = await self.manager.get_msg(stream, number)
            headers = {name: unquote(value) for name, value in (message.headers or {}).items()}
            found.append(Found(headers["Nats-Msg-Id"], message.subject or "", message.data or b"", headers))
        return found


@asynccontextmanager
async def desk(url: str, **login: Any) -> AsyncIterator[Desk]:
    client = await nats.connect(url, **login)
    try:
        yield Desk(client)
    finally:
        await client.close()
