"""The process of a `Receiver`: it appends each request to a file before it answers. A GET gives the last body.
A path that ends with /hang gets no answer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from base64 import b64decode, b64encode
from pathlib import Path

from aiohttp import web


def main() -> None:
    port, path, most_bytes = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    asyncio.run(_serve(port, path, most_bytes))


def _last(path: Path) -> bytes:
    """The body of the last request that was kept."""
    lines = path.read_bytes().splitlines()
    return b64decode(json.loads(lines[-1])["body"]) if lines else b""


async def _serve(port: int, path: Path, most_bytes: int) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def take(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.path.endswith("/hang"):
            await asyncio.Event().wait()
        if len(body) > most_bytes:
            return web.Response(status=413)
        if request.method == "GET":
            return web.Response(body=_last(path))
        headers = {name.lower(): value for name, value in request.headers.items()}
        line = {"at": time.time(), "path": request.path, "headers": headers, "body": b64encode(body).decode()}
        os.write(log, json.dumps(line).encode() + b"\n")
        return web.Response(status=204)

    runner = web.ServerRunner(web.Server(take))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
