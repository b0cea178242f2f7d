"""Cards of users: one service owns the users, another one shows them, and Kafka is between the two.

Both are on MongoDB here. See the README beside this file.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its types leave them out
from pymongo import MongoClient, ReturnDocument
from pymongo.client_session import ClientSession

from pillarbox import Consumer, Event, Handlers, Inbox, Outbox

TOPIC: Final = "sc.domain.user"
DEAD_TOPIC: Final = "sc.domain.user.dead"
GROUP: Final = "sc-proj-user-cards"
# How often the relay tries to publish an event of a type before it is dead.
MAX_RETRIES: Final = {"user.created": 10, "user.updated": 5}


class Users:
    """The service that owns the users. A change and its event are one transaction."""

    def __init__(self, url: str) -> None:
        self.client: MongoClient[dict[str, Any]] = MongoClient(url)
        self.users = self.client.get_default_database()["users"]
        self.outbox = Outbox()

    def create(self, user_id: str, name: str) -> None:
        def work(session: ClientSession) -> None:
            user = {"_id": user_id, "name": name, "entity_version": 1}
            self.users.insert_one(user, session=session)
            self._tell(session, "user.created", user)

        with self.client.start_session() as session:
            session.with_transaction(work)

    def rename(self, user_id: str, name: str) -> None:
        def work(session: ClientSession) -> None:
            change = {"$set": {"name": name}, "$inc": {"entity_version": 1}}
            user = self.users.find_one_and_update(
                {"_id": user_id}, change, session=session, return_document=ReturnDocument.AFTER
            )
            assert user is not None
            self._tell(session, "user.updated", user)

        with self.client.start_session() as session:
            session.with_transaction(work)

    def _tell(self, session: ClientSession, type_: str, user: dict[str, Any]) -> None:
        self.outbox.add(
            session,
            type_,
            {"id": user["_id"], "name": user["name"]},
            topic=TOPIC,
            aggregate_type="user",
            aggregate_id=user["_id"],  # also the key, so that a user's events are in order
            aggregate_version=user["entity_version"],
            max_attempts=MAX_RETRIES[type_],
        )


class Cards:
    """The service that shows users."""

    def __init__(self, url: str) -> None:
        self.client: MongoClient[dict[str, Any]] = MongoClient(url)
        self.cards = self.client.get_default_database()["cards"]
        self.inbox = Inbox(GROUP)
        self.handlers = Handlers()
        self.handlers.on("user.created", "user.updated")(self.inbox.once(self.client)(self.show))

    def show(self, event: Event, tx: ClientSession) -> None:
        """Called for each event once; an event that is older than the card changes nothing."""
        if self.inbox.newer(tx, event):
            user = json.loads(event.payload)
            card = {"name": user["name"], "entity_version": event.aggregate_version}
            # The count would tell of an event that was applied twice.
            self.cards.update_one({"_id": user["id"]}, {"$set": card, "$inc": {"changes": 1}}, upsert=True, session=tx)

    def consumer(self, kafka: str) -> Consumer:
        return Consumer(
            GROUP,
            f"{kafka}?topic={TOPIC}&group={GROUP}&session.timeout.ms=6000",
            to=self.handlers,
            dead_to=f"{kafka}?topic={DEAD_TOPIC}",
        )


def make_topics(kafka: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.removeprefix("kafka://"), "log_level": 3})
    known = admin.list_topics(timeout=30).topics
    missing = [NewTopic(name, num_partitions=4) for name in (TOPIC, DEAD_TOPIC) if name not in known]
    for made in admin.create_topics(missing).values() if missing else ():
        made.result()


class Processes:
    """Consumers in processes of their own."""

    def __init__(self, count: int, store: str, kafka: str) -> None:
        self._command = [sys.executable, __file__, "--consume", store, kafka]
        self._running = [self._start() for _ in range(count)]

    def kill_one(self) -> None:
        """Kill a consumer at whatever it does, and start another one."""
        killed = self._running.pop(random.randrange(len(self._running)))
        killed.kill()
        killed.wait()
        self._running.append(self._start())

    def stop(self) -> None:
        for each in self._running:
            each.terminate()  # it finishes what it has begun
        for each in self._running:
            each.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command)


@contextmanager
def relay(store: str, kafka: str) -> Iterator[None]:
    """The relay needs no code. It also deletes what is old: published events, and the ids of applied ones."""
    environment = os.environ | {"PILLARBOX_STORE": store}
    command = [sys.executable, "-m", "pillarbox", "relay", "--to", f"{kafka}?topic={TOPIC}", "--log-level", "warning"]
    running = subprocess.Popen(command, env=environment)
    try:
        yield
    finally:
        running.terminate()
        running.wait()


def story(store: str, kafka: str, kills: int) -> None:
    subprocess.run([sys.executable, "-m", "pillarbox", "init"], env=os.environ | {"PILLARBOX_STORE": store}, check=True)
    make_topics(kafka)
    users, cards = Users(store), Cards(store)
    names = [f"user-{number}" for number in range(40)]

    def live(user_id: str) -> None:
        users.create(user_id, "new")
        for number in range(1, 10):
            users.rename(user_id, f"name {number}")

    def right() -> int:
        """The cards that show their user's last state, and were changed once for each of its versions."""
        wanted = [
            {"_id": user["_id"], "name": user["name"], "entity_version": user["entity_version"]}
            for user in users.users.find()
        ]
        return sum(cards.cards.count_documents({**user, "changes": user["entity_version"]}, limit=1) for user in wanted)

    with relay(store, kafka):
        consumers = Processes(2, store, kafka)
        with ThreadPoolExecutor(4) as pool:
            living = [pool.submit(live, name) for name in names]
            for _ in range(kills):
                time.sleep(1)
                consumers.kill_one()
            for each in living:
                each.result()
        while right() < len(names):
            time.sleep(0.2)
        consumers.stop()
    print(f"{len(names)} users with {10 * len(names)} changes; {kills} consumers killed")
    print(f"{right()} cards show the last state, and each change was applied once")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Change users, and show them on cards while consumers are killed.")
    parser.add_argument("store", help="for example mongodb://localhost/entities?replicaSet=rs0")
    parser.add_argument("kafka", help="for example kafka://localhost:9092")
    parser.add_argument("--kills", type=int, default=4, help="consumers to kill on the way")
    parser.add_argument("--consume", action="store_true", help="only be one of the consumers")
    chosen = parser.parse_args()
    if chosen.consume:
        asyncio.run(Cards(chosen.store).consumer(chosen.kafka).run())
    else:
        story(chosen.store, chosen.kafka, chosen.kills)
