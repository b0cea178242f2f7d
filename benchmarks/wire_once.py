"""The transactional producers of the bare scripts: one for each shard, with a note of each batch beside its events."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from confluent_kafka import admin as confluent_admin

from benchmarks.wire import PRODUCER_SETTINGS, BareProducer

kafka_admin: Any = confluent_admin  # its types leave out what it exports
_NOT_IN_TRANSACTIONS = ("message.timeout.ms", "enable.gapless.guarantee")
SETTINGS = {
    **{name: value for name, value in PRODUCER_SETTINGS.items() if name not in _NOT_IN_TRANSACTIONS},
    "transaction.timeout.ms": 15_000,
}


class BareTransactions:
    """The producers of all shards, each made when it is needed."""

    def __init__(self, servers: str, topic: str, shards: int) -> None:
        self._servers, self._topic = servers, topic
        self._name = f"floor-{uuid4().hex}"
        self._producers: dict[int, BareProducer] = {}
        new = kafka_admin.NewTopic(f"{self._name}.progress", shards, 1, config={"cleanup.policy": "compact"})
        admin = kafka_admin.AdminClient({"bootstrap.servers": servers})
        admin.create_topics([new])[f"{self._name}.progress"].result(30)

    def send(self, shard: int, rows: list[Any], batch: bytes, ids: Sequence[bytes]) -> None:
        """Send rows and the note of them; returns when the transaction is committed."""
        found = self._producers.get(shard)
        if found is None:
            settings = {**SETTINGS, "transactional.id": f"{self._name}.{shard}"}
            found = self._producers[shard] = BareProducer(self._servers, self._topic, settings)
            found.producer.init_transactions(10)
        found.producer.begin_transaction()
        note = b"\1" + batch + bytes(16) + b"".join(ids)
        found.producer.produce(f"{self._name}.progress", note, str(shard).encode(), shard, found.report)
        found.send(rows)
        found.producer.commit_transaction(10)
