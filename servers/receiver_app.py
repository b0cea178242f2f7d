"""The process of a `Receiver`: it appends each request to a file before it answers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from base64 import b64encode

from aiohttp import web


def main() -> None:
    port, path, most_bytes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    asyncio.run(_serve(port, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), most_bytes))


async def _serve(port: int, log: int, most_bytes: int) -> None:
    async def take(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if len(body) > most_bytes:
            return web.Response(status=413)
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
