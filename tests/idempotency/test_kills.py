"""The server process is killed at every point of a request: one effect, then the same answer."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.idempotency.places import DATABASES, Place, new_key
from tests.idempotency.server import POINTS
from tests.idempotency.shop import Shop, stored_part

ROOT = Path(__file__).parents[2]


class Server:
    """The process; each request is served by a child of it, which may kill itself."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.idempotency.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.port = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def post(self, place: Place, point: str, key: str) -> httpx.Response | None:
        """None: the server died before its answer was complete."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{place.database} {place.url} {place.prefix} {point}\n")
        self.process.stdin.flush()
        headers = {"idempotency-key": key, "user": "ann"}
        try:
            return httpx.post(
                f"http://127.0.0.1:{self.port}/orders", content=json.dumps({"label": key}), headers=headers, timeout=60
            )
        except httpx.TransportError:
            return None
        finally:
            assert self._line() == "ended\n"

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("place", DATABASES, indirect=True)
@pytest.mark.asyncio
async def test_a_server_that_is_killed(place: Place, server: Server) -> None:
    handle = place.handle()
    shop = Shop(place, handle)
    for point in POINTS:
        key = new_key()
        first = server.post(place, point, key)
        is_committed = point in ("committed", "sending", "never")
        assert (first is None) == (point != "never")
        assert place.orders(key) == is_committed, point
        second = await shop.post(key)
        while second.status_code == 409:
            place.end_transactions_of_the_dead()
            second = await shop.post(key)
        third = await shop.post(key)
        assert ("idempotent-replayed" in second.headers) == is_committed, point
        assert "idempotent-replayed" in third.headers
        assert second.status_code == 201
        for other in [third, *([first] if first is not None else [])]:
            assert stored_part(other) == stored_part(second)
        assert place.orders(key) == 1, point
    await place.close(handle)
