"""A bare drain with asyncpg and aiohttp. As safe as ours: signed, and one request of a key at a time."""

import asyncio
import base64
import hmac
import time
from collections.abc import Iterator
from typing import Any

import aiohttp

from benchmarks.child import answer, settings_from_parent
from benchmarks.floor_postgres import Floor
from benchmarks.hooks import CONCURRENCY, KEY

_CONSTANT_HEADERS = {
    "content-type": "application/json",
    "event-type": "order.created",
    "tenant": "default",
    "aggregate-type": "order",
}


class HttpFloor(Floor[aiohttp.ClientSession]):
    """A floor whose slots share one client, and so many requests at once."""

    async def run(self) -> None:
        self.room = asyncio.Semaphore(CONCURRENCY)
        self.url = self.settings["servers"] + self.settings["topic"]
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        ) as self.session:
            await super().run()

    def destination(self) -> aiohttp.ClientSession:
        return self.session

    async def send(self, destination: aiohttp.ClientSession, rows: list[Any]) -> None:
        keys: dict[str, list[Any]] = {}
        for row in rows:
            keys.setdefault(row[1], []).append(row)
        waiting = iter(keys.values())
        await asyncio.gather(*(self._send_keys(destination, waiting) for _ in range(min(CONCURRENCY, len(keys)))))

    async def _send_keys(self, session: aiohttp.ClientSession, waiting: Iterator[list[Any]]) -> None:
        for run in waiting:
            for event_id, key, occurred_at, payload in run:
                identity, now = str(event_id), str(int(time.time()))
                signed = hmac.digest(KEY, f"{identity}.{now}.".encode() + payload, "sha256")
                headers = {
                    **_CONSTANT_HEADERS,
                    "event-id": identity,
                    "occurred-at": occurred_at.isoformat(),
                    "aggregate-id": key,
                    "event-key": key,
                    "webhook-id": identity,
                    "webhook-timestamp": now,
                    "webhook-signature": f"v1,{base64.b64encode(signed).decode()}",
                }
                async with (
                    self.room,
                    session.post(self.url, data=payload, headers=headers, allow_redirects=False) as answered,
                ):
                    answered.raise_for_status()


def main() -> None:
    floor = HttpFloor(settings_from_parent())
    asyncio.run(floor.run())
    answer(floor.clock.report())


if __name__ == "__main__":
    main()
