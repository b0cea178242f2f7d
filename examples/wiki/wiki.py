"""A wiki on MongoDB, without a broker: handlers in the relay render, index and count its pages.

Saving a page writes a revision and three events, one for each stream of work. See the README beside this file.
"""

import argparse
import asyncio
import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry
from pymongo import MongoClient, ReturnDocument
from pymongo.client_session import ClientSession

from pillarbox import Check, Event, Handlers, Outbox, Reject, Relay, Stream, stable_id, upsert
from pillarbox.maintenance.reconcile import Reconcile
from pillarbox.observe.prometheus import Prometheus

CREATED = "PageRevisionCreated"
# The stream that renders comes last: if a revision has a snapshot, all its events were written. The check below looks
# for missing snapshots, so it misses none.
STREAMS = ("media", "search", "wiki")
LINK = re.compile(r"\[\[(.*?)\]\]")
MEDIA = re.compile(r"\{\{(.*?)\}\}")


class Wiki:
    """transactions: False for a standalone server. patience: how long a save may take until its events are written."""

    def __init__(self, url: str, *, transactions: bool = True, patience: timedelta = timedelta(minutes=1)) -> None:
        self.url = url
        self.transactions = transactions
        self.patience = patience
        self.client: MongoClient[dict[str, Any]] = MongoClient(url)
        database = self.client.get_default_database()
        self.pages, self.revisions = database["pages"], database["revisions"]
        self.snapshots, self.words, self.media = database["snapshots"], database["words"], database["media"]
        self.metrics = Prometheus(registry=CollectorRegistry())
        self.outbox = Outbox(transactions=transactions, observers=[self.metrics])

    def save(self, page_id: str, text: str) -> int:
        """Save a page and return the number of the new revision."""
        if not self.transactions:
            revision_id = self.write(page_id, text)
            # Data first: a process that dies here leaves a revision without events, and the check finds it.
            self.outbox.add_all(self.client, self.events(page_id, revision_id), on_duplicate="ignore")
            return revision_id

        def both(session: ClientSession) -> int:
            revision_id = self.write(page_id, text, session)
            self.outbox.add_all(session, self.events(page_id, revision_id))
            return revision_id

        with self.client.start_session() as session:
            return session.with_transaction(both)

    def write(self, page_id: str, text: str, session: ClientSession | None = None) -> int:
        """Write only the data. Each step does no harm if the next one never comes."""
        page: Any = self.pages.find_one_and_update(
            {"_id": page_id}, {"$inc": {"last": 1}}, upsert=True, return_document=ReturnDocument.AFTER, session=session
        )
        revision_id: int = page["last"]
        self.revisions.insert_one({"_id": f"{page_id}:{revision_id}", "text": text}, session=session)
        head = {"$max": {"head": revision_id}, "$set": {"saved_at": datetime.now(UTC)}}
        self.pages.update_one({"_id": page_id}, head, session=session)
        return revision_id

    def events(self, page_id: str, revision_id: int) -> list[Event]:
        revision = {"page_id": page_id, "revision_id": revision_id}
        return [
            self.outbox.event(CREATED, revision, stream=stream, id=stable_id(CREATED, page_id, revision_id, stream))
            for stream in STREAMS
        ]

    def heads_without_snapshot(self) -> Iterator[Event]:
        """The check: events that a writer without transactions did not write because it died."""
        missing = self.pages.aggregate(
            [
                {"$match": {"saved_at": {"$lt": datetime.now(UTC) - self.patience}}},
                {"$set": {"snapshot": {"$concat": ["$_id", ":", {"$toString": "$head"}]}}},
                {"$lookup": {"from": "snapshots", "localField": "snapshot", "foreignField": "_id", "as": "found"}},
                {"$match": {"found": []}},
            ]
        )
        for page in missing:
            yield from self.events(page["_id"], page["head"])

    # An event may come twice, and a queue stream has no order: each handler is an upsert, and a later revision wins.

    def render(self, event: Event) -> None:
        page_id, revision_id, text = self.revision(event)
        if text.count("[[") != len(LINK.findall(text)):
            raise Reject(f"{page_id}:{revision_id} has a link without an end")  # a retry would not help
        body = LINK.sub(r'<a href="\1">\1</a>', MEDIA.sub(r'<img src="\1">', html.escape(text)))
        upsert(self.client, "snapshots", {"_id": f"{page_id}:{revision_id}"}, {"html": body})

    def index(self, event: Event) -> None:
        page_id, revision_id, text = self.revision(event)
        found = {"words": sorted(set(re.findall(r"\w+", text.lower())))}
        upsert(self.client, "words", {"_id": page_id}, found, revision_id, version_column="revision_id")

    def recount(self, event: Event) -> None:
        page_id, revision_id, text = self.revision(event)
        found = {"links": len(LINK.findall(text)), "media": len(MEDIA.findall(text))}
        upsert(self.client, "media", {"_id": page_id}, found, revision_id, version_column="revision_id")

    def revision(self, event: Event) -> tuple[str, int, str]:
        of = json.loads(event.payload)
        revision = self.revisions.find_one({"_id": f"{of['page_id']}:{of['revision_id']}"})
        if revision is None:
            raise Reject(f"there is no revision {of['page_id']}:{of['revision_id']}")
        return of["page_id"], of["revision_id"], revision["text"]

    def relay(self, listen: str | None = None) -> Relay:
        streams = []
        for name, function in (("wiki", self.render), ("search", self.index), ("media", self.recount)):
            handlers = Handlers()
            handlers.on(CREATED)(function)
            streams.append(Stream(name, to=handlers, mode="queue", concurrency=4, max_attempts=5, lease="60s"))
        checks = [Check("snapshots", self.heads_without_snapshot)]
        return Relay(self.url, streams, checks=checks, observers=[self.metrics], listen=listen)


def relay() -> Relay:
    """For ``pillarbox relay wiki:relay``."""
    wiki = Wiki(os.environ["WIKI_URL"], transactions=os.environ.get("WIKI_TRANSACTIONS") != "0")
    return wiki.relay(os.environ.get("WIKI_LISTEN"))


async def story(wiki: Wiki) -> None:
    relay = wiki.relay()
    await relay.store.migrate()
    async with relay:
        for number in range(20):
            text = f"Revision {number} of a page with a [[link]] and a {{{{picture.png}}}}."
            await asyncio.to_thread(wiki.save, f"page-{number % 5}", text)
        await asyncio.to_thread(wiki.save, "broken", "This [[link never ends.")
        print("saved: 20 revisions of 5 pages, and a page that cannot be rendered")
        if not wiki.transactions:
            await asyncio.to_thread(wiki.write, "forgotten", "The writer of this [[page]] died before its events.")
            # A relay does this by itself, for the first time a minute after its start.
            done = await Reconcile(relay.store, relay.checks[0]).run_once()
            print(f"a writer died between its data and its events; the check emitted {done.emitted} events")
        await relay.drain()
    kinds = (wiki.revisions, wiki.snapshots, wiki.words, wiki.media)
    print("there are now:", ", ".join(f"{kind.count_documents({})} {kind.name}" for kind in kinds))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Save some pages, and let handlers render, index and count them.")
    arguments.add_argument("url", help="for example mongodb://localhost/wiki?replicaSet=rs0")
    arguments.add_argument("--without-transactions", action="store_true", help="for a standalone server")
    chosen = arguments.parse_args()
    # The story does not wait until a save is certainly over.
    asyncio.run(story(Wiki(chosen.url, transactions=not chosen.without_transactions, patience=timedelta(0))))
    print("pillarbox status:", flush=True)
    subprocess.run([sys.executable, "-m", "pillarbox", "status"], env=os.environ | {"PILLARBOX_STORE": chosen.url})
