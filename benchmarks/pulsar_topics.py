"""Pulsar as the destination of a row: its topics, and how many messages have arrived in them."""

import json
import urllib.request
import uuid
from typing import Any

from servers import Pulsar

PARTITIONS = 4


class PulsarTopics:
    """The same questions that rows ask the bed about Kafka."""

    def __init__(self, server: Pulsar) -> None:
        self._server = server

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    def topic(self, name: str) -> str:
        """A new topic."""
        unique = f"{name}-{uuid.uuid4().hex[:6]}"
        self._ask("PUT", f"{unique}/partitions", PARTITIONS)
        return unique

    def messages(self, topic: str) -> int:
        """The number of messages that the topic has taken."""
        return int(json.loads(self._ask("GET", f"{topic}/partitioned-stats"))["msgInCounter"])

    def drop_topic(self, name: str) -> None:
        self._ask("DELETE", f"{name}/partitions?force=true")

    def _ask(self, method: str, path: str, body: object = None) -> bytes:
        address = f"{self._server.admin_url}/admin/v2/persistent/public/default/{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, method=method, data=data)
        request.add_header("Content-Type", "application/json")
        answer: Any
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: bytes = answer.read()
            return found
