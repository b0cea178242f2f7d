"""A shop for videos: a purchase and its event are one transaction in MongoDB, and relays bring the event to Kafka.

The relays are processes of the command line and need no code. See the README beside this file.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its types leave them out
from pymongo import MongoClient
from pymongo.client_session import ClientSession

from pillarbox import Outbox, stable_id

TOPIC = "outbox_events"


class Checkout:
    """Purchases and wallets of customers."""

    def __init__(self, url: str) -> None:
        # Ids are standard UUIDs, like those of events.
        self.client: MongoClient[dict[str, Any]] = MongoClient(url, uuidRepresentation="standard")
        database = self.client.get_default_database()
        self.purchases, self.wallets = database["purchases"], database["wallets"]
        self.videos = database["videos"]
        self.outbox = Outbox()

    def buy(self, customer: str, video: str, cents: int) -> UUID:
        """Buy a video and return the id of the event. Raises TooPoor; then neither purchase nor event exists."""
        purchase_id = uuid4()
        event_id = stable_id("purchase", purchase_id)
        purchase = {"purchase_id": purchase_id, "customer": customer, "video": video, "cents": cents}

        def pay(session: ClientSession) -> None:
            self.purchases.insert_one({"_id": purchase_id, **purchase}, session=session)
            # The message gets the key of the event. Each event has its own key, so they have no order.
            self.outbox.add(session, "video.purchased", purchase, id=event_id, key=event_id)
            enough = {"_id": customer, "cents": {"$gte": cents}}
            if not self.wallets.update_one(enough, {"$inc": {"cents": -cents}}, session=session).modified_count:
                raise TooPoor(customer)

        with self.client.start_session() as session:
            session.with_transaction(pay)
        return event_id

    def upload(self, bucket: str, name: str, media_type: str) -> UUID:
        """Offer a video, and return the id of the event, for which a runner does its work once."""
        event_id = stable_id("video", bucket, name)
        video = {"bucket": bucket, "object": name, "media_type": media_type}

        def offer(session: ClientSession) -> None:
            self.videos.insert_one({"_id": event_id, **video}, session=session)
            self.outbox.add(session, "video.uploaded", video, id=event_id, key=event_id)

        with self.client.start_session() as session:
            session.with_transaction(offer)
        return event_id


class TooPoor(Exception):
    """A customer has less money than a video costs."""


@contextmanager
def relays(count: int, store: str, kafka: str) -> Iterator[None]:
    """Run this many relays. They wait for MongoDB or Kafka if it is away."""
    # The URL of a database can contain a password, and other users can read arguments in the list of processes.
    environment = os.environ | {"PILLARBOX_STORE": store}
    to = f"{kafka}?topic={TOPIC}&envelope=legacy&delivery=exactly-once"
    command = [sys.executable, "-m", "pillarbox", "relay", "--to", to, "--max-attempts", "3", "--lease", "60s"]
    started = [subprocess.Popen([*command, "--log-level", "warning"], env=environment) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.terminate()  # it finishes its running turns
        for each in started:
            each.wait()


def make_topic(kafka: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.removeprefix("kafka://"), "log_level": 3})
    if TOPIC not in admin.list_topics(timeout=30).topics:
        admin.create_topics([NewTopic(TOPIC, num_partitions=4)])[TOPIC].result()


def read(kafka: str, wanted: Collection[UUID]) -> list[dict[str, Any]]:
    """Read the topic from its beginning, until all wanted events were seen and nothing more comes."""
    servers = kafka.removeprefix("kafka://")
    # Without the messages of a transaction that was aborted, because its relay had died.
    committed = {"isolation.level": "read_committed"}
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "video-checkout", **committed})
    partitions = consumer.list_topics(TOPIC, timeout=30).topics[TOPIC].partitions
    consumer.assign([TopicPartition(TOPIC, number, OFFSET_BEGINNING) for number in partitions])
    found: list[dict[str, Any]] = []
    missing = {str(event_id) for event_id in wanted}
    while (messages := consumer.consume(500, timeout=1)) or missing:
        found += [json.loads(message.value() or b"null") for message in messages if not message.error()]
        missing -= {each["_id"] for each in found}
    consumer.close()
    return found


def story(store: str, kafka: str) -> None:
    subprocess.run([sys.executable, "-m", "pillarbox", "init"], env=os.environ | {"PILLARBOX_STORE": store}, check=True)
    make_topic(kafka)
    checkout = Checkout(store)
    customers = [f"customer-{number}" for number in range(20)]
    for customer in customers:
        checkout.wallets.replace_one({"_id": customer}, {"cents": 5_000}, upsert=True)

    def shop(customer: str) -> list[UUID]:
        bought = []
        for number in range(15):
            try:
                bought.append(checkout.buy(customer, f"video-{number}", cents=499))
            except TooPoor:
                continue
        return bought

    with relays(3, store, kafka):
        with ThreadPoolExecutor(8) as pool:
            bought = [event_id for each in pool.map(shop, customers) for event_id in each]
        print(f"bought: {len(bought)} videos; refused and rolled back: {15 * len(customers) - len(bought)}")
        found = Counter(each["_id"] for each in read(kafka, bought))
    once = sum(found[str(event_id)] == 1 for event_id in bought)
    print(f"in the topic {TOPIC}: all {len(bought)} events, {once} of them once, {len(bought) - once} with copies")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description="Sell some videos, and let three relays publish the events to Kafka."
    )
    arguments.add_argument("store", help="for example mongodb://localhost/video?replicaSet=rs0")
    arguments.add_argument("kafka", help="for example kafka://localhost:9092")
    chosen = arguments.parse_args()
    story(chosen.store, chosen.kafka)
