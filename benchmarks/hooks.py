"""The receiver of a run over HTTP, and what both sides know of it."""

import base64
import uuid
from typing import Final

from pillarbox.event import Event
from pillarbox.publishers.http import Endpoint, HttpPublisher
from servers import Receiver

CONCURRENCY: Final = 16
KEY: Final = b"a key for both sides: 32 bytes.."
SECRET: Final = f"whsec_{base64.b64encode(KEY).decode()}"


class Hooks:
    """A topic is a path of the receiver."""

    def __init__(self, server: Receiver) -> None:
        self._server = server

    @property
    def servers(self) -> str:
        return self._server.url

    def topic(self, name: str) -> str:
        return f"{name}-{uuid.uuid4().hex[:6]}"

    def messages(self, topic: str) -> int:
        """The requests to a path and to those below it."""
        return self._server.count(f"/{topic}")

    def drop_topic(self, name: str) -> None:
        """The receiver keeps all until it is closed."""


def to_endpoints(url: str, count: int, *, hangs: bool) -> HttpPublisher:
    """A publisher for so many endpoints, which share the keys. hangs: the first of them never answers."""
    paths = [f"{url}/{number}" for number in range(count)]
    if hangs:
        paths[0] = f"{url}/hang"
    endpoints = [Endpoint(path, SECRET, trusted=True) for path in paths]

    def choose(event: Event) -> Endpoint:
        return endpoints[int((event.key or "").rpartition("-")[2]) % count]

    return HttpPublisher(endpoints=choose)
