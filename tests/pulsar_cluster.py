"""Topics and messages of a real Pulsar, made and read without the publisher."""

import json
import os
import urllib.error
import urllib.request
import uuid
from typing import Any, NamedTuple

import pulsar as client_library

from servers import Pulsar


class Record(NamedTuple):
    partition: int
    key: str | None
    value: bytes
    headers: dict[str, str]
    timestamp: int
    batch: tuple[int, int]  # the same for all messages of one batch


class Cluster:
    """``client``: arguments of its clients."""

    def __init__(self, server: Pulsar, **client: Any) -> None:
        self.server = server
        self._client = client

    @property
    def servers(self) -> str:
        return self.server.url.removeprefix("pulsar://")

    def topic(self, partitions: int = 0, *, namespace: str = "public/default") -> str:
        """The short name of a new topic; 0: without partitions."""
        name = f"t-{uuid.uuid4().hex[:12]}"
        path = f"persistent/{namespace}/{name}"
        self.admin("PUT", f"{path}/partitions", partitions) if partitions else self.admin("PUT", path)
        return name

    def namespace(self, *, creates_topics: bool = False) -> str:
        name = f"public/n-{uuid.uuid4().hex[:12]}"
        self.admin("PUT", f"namespaces/{name}", {"replication_clusters": ["standalone"]})
        self.admin(
            "POST",
            f"namespaces/{name}/autoTopicCreation",
            {"allowAutoTopicCreation": creates_topics, "topicType": "non-partitioned"},
        )
        return name

    def admin(self, method: str, path: str, body: object = None) -> bytes:
        request = urllib.request.Request(f"{self.server.admin_url}/admin/v2/{path}", method=method)
        request.add_header("Content-Type", "application/json")
        if self.server.admin_token:
            request.add_header("Authorization", f"Bearer {self.server.admin_token}")
        if body is not None:
            request.data = json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read()!r}") from error

    def client(self) -> Any:
        return client_library.Client(
            self.server.url,
            stats_interval_in_seconds=0,
            logger=client_library.FileLogger(client_library.LoggerLevel.Error, os.devnull),
            **self._client,
        )

    def read(self, topic: str) -> list[Record]:
        """All messages, partition by partition."""
        client = self.client()
        records: list[Record] = []
        try:
            for partition, name in enumerate(client.get_topic_partitions(_full(topic))):
                reader = client.create_reader(name, client_library.MessageId.earliest)
                while reader.has_message_available():
                    message = reader.read_next(20_000)
                    place = message.message_id()
                    records.append(
                        Record(
                            partition,
                            message.partition_key() or None,
                            message.data(),
                            message.properties(),
                            message.publish_timestamp(),
                            (place.ledger_id(), place.entry_id()),
                        )
                    )
        finally:
            client.close()
        return records


def _full(topic: str) -> str:
    return topic if "/" in topic else f"persistent://public/default/{topic}"
