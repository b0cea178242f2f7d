"""A writer as a program: changes aggregates on MongoDB with their events until its input ends, and keeps a ledger."""

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
    """The application gives up in its transaction, after it has added the event."""


def work(url: str, prefix: str, seed: int, keys: int, stop: threading.Event) -> None:
    chance = random.Random(seed)
    outbox = Outbox(prefix=prefix)
    with MongoClient[Any](url) as client, client.start_session() as session:
        aggregates = client.get_default_database()[f"{prefix}_aggregate"]
        while not stop.is_set():
            key = chance.randrange(keys)
            hold, abort = chance.random() < 0.3, chance.random() < 0.2
            added: list[str] = []
            tries: list[int] = []

            def change(session: ClientSession) -> None:
                tries.append(1)  # noqa: B023
                # The conflict on this document is what makes the transactions of a key take turns.
                found = aggregates.find_one_and_update(
                    {"_id": key},  # noqa: B023 - called before the next round
                    {"$inc": {"version": 1}},
                    upsert=True,
                    return_document=ReturnDocument.AFTER,
                    session=session,
                )
                if hold:  # noqa: B023
                    time.sleep(chance.random() * 0.02)
                event = outbox.add(session, "changed", {}, key=key, aggregate_version=found["version"])  # noqa: B023
                added.append(str(event.id))  # noqa: B023
                if hold:  # noqa: B023
                    time.sleep(chance.random() * 0.02)
                if abort:  # noqa: B023
                    raise ChangedMind

            try:
                session.with_transaction(change, write_concern=WriteConcern("majority"))
                outcome = "committed"
            except ChangedMind:
                outcome = "aborted"
            except PyMongoError as error:
                outcome = f"unknown: {error}"
            print(json.dumps({"outcome": outcome, "tries": len(tries), "ids": added}), flush=True)


def main() -> None:
    url, prefix, seed, keys = sys.argv[1:]
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    work(url, prefix, int(seed), int(keys), stop)


if __name__ == "__main__":
    main()
