"""TLS in front of a server that has none, as stunnel does it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.integration.certificates import Certificates


@asynccontextmanager
async def tls_front(port: int, files: Certificates) -> AsyncIterator[int]:
    """The port on which a client of the server behind ``port`` has to speak TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.authority))
    context.load_cert_chain(files.server, files.server_key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(reader, back_writer))
                tasks.create_task(_copy(back_reader, writer))
        finally:
            for each in (writer, back_writer):
                each.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
