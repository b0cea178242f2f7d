"""Payments on MySQL or PostgreSQL, dispatched to Kafka: an event is saved with its payment, and relays do the rest.

One stream keeps the order of each account. The other one is a queue with a publisher of the example's own. Events that
a dead worker holds are rescued there. See the README beside this file.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its types leave them out
from sqlalchemy import Engine, create_engine, text

from pillarbox import Event, Outbox, Reject, Relay, Schedule, Stream
from pillarbox.batch import Batch
from pillarbox.envelopes import default_headers
from pillarbox.errors import ConfigError, Outage
from pillarbox.publisher import PUBLISHED, Outcome, Publisher
from pillarbox.publishers.kafka import KafkaPublisher
from pillarbox.publishers.keyed import send_by_key

URL = os.environ.get("DISPATCHER_URL", "postgresql://localhost/dispatcher")
SERVERS = os.environ.get("DISPATCHER_KAFKA", "localhost:9092")
PAYMENTS, REFUNDS, RECEIPTS = "payments", "refunds", "receipts"
_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}


class Bank:
    """Accounts, and what they pay. Each change and its event are one transaction."""

    def __init__(self, url: str) -> None:
        kind, _, rest = url.partition("://")
        self.engine: Engine = create_engine(f"{_DRIVERS[kind]}://{rest}")
        # An event that names no stream is written to these: one row for each, with a state of its own.
        self.outbox = Outbox(routes={"payment.made": ["default", RECEIPTS]})

    def make_tables(self) -> None:
        columns = "id varchar(40) PRIMARY KEY, mail varchar(100), cents bigint, moves integer"
        with self.engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE IF NOT EXISTS account ({columns})"))

    def open_account(self, account: str, mail: str, cents: int) -> None:
        row = {"id": account, "mail": mail, "cents": cents}
        with self.engine.begin() as connection:
            connection.execute(text("DELETE FROM account WHERE id = :id"), row)
            connection.execute(text("INSERT INTO account VALUES (:id, :mail, :cents, 0)"), row)

    def pay(self, account: str, cents: int) -> None:
        """Raises TooPoor; then neither the payment nor its event exists."""
        self._move(account, -cents, "payment.made")

    def refund(self, account: str, cents: int) -> None:
        self._move(account, cents, "payment.refunded", topic=REFUNDS)  # a topic of the event's own

    def _move(self, account: str, cents: int, type: str, topic: str = "") -> None:
        with self.engine.begin() as connection:
            # The change locks the account's row. Its events then have the order of the changes.
            change = text("UPDATE account SET cents = cents + :cents, moves = moves + 1 WHERE id = :id")
            connection.execute(change, {"cents": cents, "id": account})
            row = connection.execute(text("SELECT mail, cents, moves FROM account WHERE id = :id"), {"id": account})
            mail, left, number = row.one()
            moved = {"account": account, "number": number, "cents": abs(cents), "mail": mail}
            self.outbox.add(connection, type, moved, key=account, topic=topic)
            if left < 0:
                raise TooPoor(account)


class TooPoor(Exception):
    """An account has less money than a payment takes."""


def headers(event: Event) -> list[tuple[str, bytes]]:
    """Our own header builder: the usual headers, and the account's branch."""
    return [*default_headers(event), ("branch", (event.key or "").partition("-")[0].encode())]


class Receipts(Publisher):
    """Our own publisher: it writes a receipt for each payment, and sends it to a topic.

    It has no order to keep, because its stream is a queue. ``send_by_key`` turns the exceptions into outcomes.
    """

    description = f"{RECEIPTS} on kafka"

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._producer: Any = None

    async def open(self) -> None:
        self._producer = Producer({"bootstrap.servers": self._servers, "acks": "all", "delivery.timeout.ms": 10_000})

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        return await send_by_key(batch, self._send)

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await asyncio.to_thread(producer.flush, 5)

    async def _send(self, event: Event) -> Outcome:
        payment = json.loads(event.payload)
        if "@" not in payment["mail"]:
            raise Reject("the account has no mail address")  # dead at once: no retry would help
        receipt = f"{payment['mail']}: you have paid {payment['cents'] / 100:.2f}"
        problem = await asyncio.to_thread(self._deliver, str(event.id), receipt)
        if problem is not None:
            raise Outage(f"the receipt was not confirmed: {problem}")  # not the event's fault
        return PUBLISHED

    def _deliver(self, event_id: str, receipt: str) -> str | None:
        """Return when the broker has it, or why it does not."""
        errors: list[Any] = []
        try:
            self._producer.produce(
                RECEIPTS,
                receipt,
                headers={"event_id": event_id},
                on_delivery=lambda error, _: errors.append(error),
            )
            while not errors:
                self._producer.poll(0.1)
        except (KafkaException, BufferError) as error:
            return str(error)
        return None if errors[0] is None else str(errors[0].str())


def relay() -> Relay:
    """For ``pillarbox relay dispatcher:relay``. Rescue and cleanup have intervals and options of their own."""
    return Relay(
        URL,
        [
            Stream(
                "default",
                to=KafkaPublisher(servers=SERVERS, topic=PAYMENTS, headers=headers),
                retry=Schedule("1s", "5s", "30s"),
                max_attempts=5,
                lease="3s",
            ),
            Stream(
                RECEIPTS,
                to=Receipts(SERVERS),
                mode="queue",
                concurrency=8,
                retry="fixed:5s",
                max_attempts=3,
                lease="3s",
                stuck="1m",  # a worker that holds an event for longer loses it, even if it is alive
            ),
        ],
        rescue_every="1s",
        prune_every="10m",
        keep_published="24h",
        keep_dead="30d",
    )


# What follows plays a story with two relays, of which one is killed.


def pillarbox(*words: str) -> None:
    environment = os.environ | {"PILLARBOX_STORE": URL}  # not an argument: it may contain a password
    subprocess.run([sys.executable, "-m", "pillarbox", *words], env=environment, check=True)


def start_relay() -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "pillarbox", "relay", "dispatcher:relay", "--log-level", "error"]
    return subprocess.Popen(words, cwd=os.path.dirname(os.path.abspath(__file__)))


@contextmanager
def two_relays() -> Iterator[list["subprocess.Popen[bytes]"]]:
    started = [start_relay(), start_relay()]
    try:
        yield started
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait()


def make_topics() -> None:
    admin = AdminClient({"bootstrap.servers": SERVERS, "log_level": 3})
    for name in {PAYMENTS, REFUNDS, RECEIPTS} - admin.list_topics(timeout=30).topics.keys():
        admin.create_topics([NewTopic(name, num_partitions=4)])[name].result()


def read(topic: str) -> list[tuple[dict[str, bytes], bytes]]:
    """The headers and the value of every message of a topic."""
    consumer = Consumer({"bootstrap.servers": SERVERS, "group.id": "dispatcher-story"})
    found: list[tuple[dict[str, bytes], bytes]] = []
    for number in consumer.list_topics(topic, timeout=30).topics[topic].partitions:
        at, end = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=30)
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING)])
        while at < end:
            message: Any = consumer.poll(1)
            if message is None or message.error():
                continue  # the client tries again by itself
            at = message.offset() + 1
            found.append((dict(message.headers()), message.value()))
    consumer.close()
    return found


def count(bank: Bank, condition: str) -> int:
    """Events in the outbox. A dead one is in another table."""
    with bank.engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM outbox_event WHERE {condition}")).scalar_one())


def wait_until_published(bank: Bank) -> None:
    while count(bank, "status <> 'published'"):
        time.sleep(0.1)


def spend(bank: Bank, accounts: Iterable[str]) -> Counter[str]:
    """Each account pays until it is too poor, and gets one payment back."""

    def shop(account: str) -> Counter[str]:
        done: Counter[str] = Counter()
        for _ in range(12):
            try:
                bank.pay(account, 499)
                done["payments"] += 1
            except TooPoor:
                done["refused"] += 1
        bank.refund(account, 499)
        done["refunds"] += 1
        return done

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(shop, accounts), Counter())


def story() -> None:
    pillarbox("init")
    make_topics()
    bank = Bank(URL)
    bank.make_tables()
    accounts = [f"{branch}-{number}" for branch in ("north", "south") for number in range(20)]
    for account in accounts:
        bank.open_account(account, f"{account}@example.com", 4_999)
    bank.open_account("south-0", "unknown", 499)
    with two_relays() as relays:
        done = spend(bank, accounts)
        while not count(bank, "status = 'published'"):
            time.sleep(0.1)
        relays[0].kill()  # kill -9: its shards and its receipts come free when its leases have run out
        relays[0].wait()
        done += spend(bank, accounts[:5])
        print(f"{done['payments']} payments, {done['refused']} refused and rolled back, {done['refunds']} refunds")
        wait_until_published(bank)
        for topic in (PAYMENTS, REFUNDS, RECEIPTS):
            print(f"in the topic {topic}: {len({headers['event_id'] for headers, _ in read(topic)})} events")
        print("receipts that cannot be sent:", flush=True)
        pillarbox("dead", "list", "--stream", RECEIPTS)
    print("cleanup of published events, which the relay does every ten minutes:", flush=True)
    pillarbox("prune", "--keep-published", "0")


if __name__ == "__main__":
    argparse.ArgumentParser(description="Pay, dispatch the events with two relays, and kill one of them.").parse_args()
    if URL.partition("://")[0] not in _DRIVERS:
        raise ConfigError(f"DISPATCHER_URL is for {' or '.join(_DRIVERS)}; write it as postgresql://... or mysql://...")
    story()
