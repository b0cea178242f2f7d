"""A small ASGI server in a process of its own, which kills itself at a chosen point of a request.

It writes its port to its output. Each line of its input names a database and a point. It serves one request for each
line, in a new process.
"""

import asyncio
import os
import signal
import socket
import sys
from typing import Any

from pillarbox import Idempotency
from tests.idempotency.places import Place
from tests.idempotency.shop import Shop

POINTS = ("begun", "written", "stored", "committed", "sending", "never")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def hook(tx: Any) -> None:
    die()


async def serve(listener: socket.socket, place: Place, point: str) -> None:
    handle = place.handle()
    Dying.point = point
    shop = Shop(place, handle, make=Dying)
    if point == "written":
        shop.hook = hook
    done = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = [
            (name.lower().encode(), value.strip().encode("latin-1"))
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        ]
        body = await reader.readexactly(int(dict(headers).get(b"content-length", b"0")))
        left = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return left.pop() if left else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                if point == "committed":
                    die()
                lines = [b"HTTP/1.1 %d OK" % message["status"], *(b"%b: %b" % header for header in message["headers"])]
                writer.write(b"\r\n".join([*lines, b"", b""]))
                return
            half = len(message["body"]) // 2
            writer.write(message["body"][:half])
            await writer.drain()
            if point == "sending":
                die()
            writer.write(message["body"][half:])

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": headers,
            "asgi": {"version": "3.0"},
        }
        await shop.app(scope, receive, send)
        writer.close()
        await writer.wait_closed()
        done.set()

    async with await asyncio.start_server(connected, sock=listener):
        await done.wait()
    await place.close(handle)


class Dying(Idempotency):
    point = ""

    async def _claim(self, *arguments: Any) -> Any:
        found = await super()._claim(*arguments)
        if self.point == "begun":
            die()
        return found

    async def _store(self, *arguments: Any) -> None:
        await super()._store(*arguments)
        if self.point == "stored":
            die()


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    for line in sys.stdin:
        child = os.fork()  # before there is a thread
        if not child:
            database, url, prefix, point = line.split()
            asyncio.run(serve(listener, Place(database, url, prefix), point))
            os._exit(0)
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
