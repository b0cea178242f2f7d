"""The streams of a run on NATS."""

import asyncio
import uuid

import nats
from nats.js import JetStreamManager
from nats.js.api import StreamConfig

from servers import Nats


class JetStreams:
    """Streams in files, whose messages are synced before they are confirmed."""

    def __init__(self, server: Nats) -> None:
        self._server = server

    @property
    def servers(self) -> str:
        return self._server.url

    def topic(self, name: str) -> str:
        """A new stream, and its only subject."""
        unique = f"{name}-{uuid.uuid4().hex[:6]}"
        asyncio.run(self._make(unique))
        return unique

    def messages(self, name: str) -> int:
        """The number of messages in a stream. Nothing is taken out while it is measured."""
        return asyncio.run(self._count(name))

    def drop_topic(self, name: str) -> None:
        asyncio.run(self._delete(name))

    async def _make(self, name: str) -> None:
        async with await nats.connect(self.servers) as client:
            await JetStreamManager(client).add_stream(StreamConfig(name=name, subjects=[name]))

    async def _count(self, name: str) -> int:
        async with await nats.connect(self.servers) as client:
            return (await JetStreamManager(client).stream_info(name)).state.messages

    async def _delete(self, name: str) -> None:
        async with await nats.connect(self.servers) as client:
            await JetStreamManager(client).delete_stream(name)
