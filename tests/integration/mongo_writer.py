"""A program that changes aggregates on MongoDB and adds their events until its input ends. It prints a ledger."""

import json
import random
import sys
import threading
import time
from typing import Any

from pymongo import MongoClient, ReturnDocument, WriteConcern
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from pillarbox import Outbox


class ChangedMind(Exception):
    """The application gives up after it has added the event."""


class Change:
    """One change of an aggregate, as a callback of ``with_transaction``."""

    def __init__(self, prefix: str, key: int, chance: random.Random) -> None:
        self.prefix = prefix
        self.key = key
        self.chance = chance
        self.holds = chance.random() < 0.3
        self.aborts = chance.random() < 0.2
        self.tries = 0
        self.ids: list[str] = []

    def __call__(self, session: ClientSession) -> None:
        self.tries += 1
        aggregates = session.client.get_default_database()[f"{self.prefix}_aggregate"]
        # The conflict on this document makes the transactions of a key take turns.
        found: Any = aggregates.find_one_and_update(
            {"_id": self.key},
            {"$inc": {"version": 1}},
            upsert=True,
            return_document=ReturnDocument.AFTER,
            session=session,
        )
        self.hold()
        outbox = Outbox(prefix=self.prefix)
        event = outbox.add(session, "changed", {}, key=self.key, aggregate_version=found["version"])
        self.ids.append(str(event.id))
        self.hold()
        if self.aborts:
            raise ChangedMind

    def hold(self) -> None:
        if self.holds:
            time.sleep(self.chance.random() * 0.02)


def work(url: str, prefix: str, seed: int, keys: int, stop: threading.Event) -> None:
    chance = random.Random(seed)
    with MongoClient[Any](url) as client, client.start_session() as session:
        while not stop.is_set():
            change = Change(prefix, chance.randrange(keys), chance)
            try:
                session.with_transaction(change, write_concern=WriteConcern("majority"))
                outcome = "committed"
            except ChangedMind:
                outcome = "aborted"
            except PyMongoError as error:
                outcome = f"unknown: {error}"
            print(json.dumps({"outcome": outcome, "tries": change.tries, "ids": change.ids}), flush=True)


def wait_for_end_of_input(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def main() -> None:
    url, prefix, seed, keys = sys.argv[1:]
    stop = threading.Event()
    threading.Thread(target=wait_for_end_of_input, args=[stop], daemon=True).start()
    work(url, prefix, int(seed), int(keys), stop)


if __name__ == "__main__":
    main()
