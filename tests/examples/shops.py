"""The checkout of examples/ as its tests see it: customers, and what is in the topic."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from pymongo.errors import PyMongoError

from examples.video_checkout.checkout import TOPIC, Checkout, TooPoor, make_topic
from pillarbox import stable_id
from servers import Kafka

WAIT = 60.0  # far above what anything takes here: it only ends a test that has failed
RICH, POOR = [f"rich-{n}" for n in range(6)], [f"poor-{n}" for n in range(2)]


class Record(NamedTuple):
    key: str
    value: dict[str, Any]


class Shop:
    """A checkout and the topic behind it, looked at without the library."""

    def __init__(self, url: str, kafka: Kafka) -> None:
        self.url = url
        self.kafka = kafka
        self.checkout = Checkout(url)
        self.outbox = self.checkout.client.get_default_database()["outbox_event"]

    def make(self) -> None:
        subprocess.run([sys.executable, "-m", "pillarbox", "init", "--store", self.url], check=True)
        make_topic(self.kafka.url)
        self.checkout.wallets.insert_many(
            [{"_id": name, "cents": 1_000_000} for name in RICH] + [{"_id": name, "cents": 1_000} for name in POOR]
        )

    def close(self) -> None:
        self.checkout.client.close()

    def buy(self, times: int) -> None:
        """Each customer so often, all at the same time; the poor are soon refused."""
        customers = [threading.Thread(target=self._shop, args=(name, times)) for name in (*RICH, *POOR)]
        for each in customers:
            each.start()
        for each in customers:
            each.join()

    def _shop(self, customer: str, times: int) -> None:
        for number in range(times):
            with suppress(TooPoor, PyMongoError):  # the database may be away
                self.checkout.buy(customer, f"video-{number}", 499)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Customers come and go meanwhile."""
        closed = threading.Event()

        def work() -> None:
            while not closed.is_set():
                self.buy(2)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            closed.set()
            thread.join()

    def committed(self) -> dict[str, dict[str, Any]]:
        """What was bought, by the id of its event: the database's own word, also where a commit's answer was lost."""
        return {str(stable_id("purchase", each["_id"])): each for each in self.checkout.purchases.find()}

    def records(self) -> list[Record]:
        """All that is committed in the topic, of whatever shop."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.kafka.bootstrap_servers,
                "group.id": uuid4().hex,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "log_level": 0,
            }
        )
        found = []
        try:
            left = set(consumer.list_topics(TOPIC, timeout=WAIT).topics[TOPIC].partitions)
            consumer.assign([TopicPartition(TOPIC, number, OFFSET_BEGINNING) for number in left])
            while left:
                message: Any = consumer.poll(WAIT)
                assert message is not None
                if message.error() is None:
                    found.append(Record(message.key().decode(), json.loads(message.value())))
                else:
                    assert message.error().code() == KafkaError._PARTITION_EOF
                    left.discard(message.partition())
        finally:
            consumer.close()
        return found

    def published(self, more: int) -> None:
        """Until the relays have published so many more."""
        done = {"status": "published"}
        goal = self.outbox.count_documents(done) + more
        until(lambda: self.outbox.count_documents(done) >= goal, "the relays to be at work")

    def all_arrived(self) -> list[Record]:
        """The records, once every event is settled as published."""
        until(lambda: not self.outbox.count_documents({"status": {"$ne": "published"}}), "every event to be published")
        records = self.records()
        assert {record.key for record in records} >= self.committed().keys()
        return records


def until(condition: Callable[[], bool], what: str, seconds: float = WAIT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


def copies(records: list[Record]) -> Counter[str]:
    return Counter({key: count - 1 for key, count in Counter(record.key for record in records).items() if count > 1})


def tells(logs: list[Path], action: str) -> Callable[[], bool]:
    return lambda: all(f"action={action}" in log.read_text() for log in logs)


Relays = Callable[..., list[Path]]
