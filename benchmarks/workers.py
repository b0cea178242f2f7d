"""Rows: several relays on one backlog, against one relay."""

import asyncio
import time
from contextlib import ExitStack

import asyncpg

from benchmarks.bed import Bed, say
from benchmarks.child import Child
from benchmarks.load import add_events, fill_postgres, waiting
from benchmarks.load_events import SHARDS
from benchmarks.report import Row
from benchmarks.scale import Scale
from benchmarks.watch import Watch
from servers.process import wait_until

COUNTS = (2, 4)
_SPREAD = "SELECT count(*) FROM outbox_lease WHERE owner IS NOT NULL AND lease_until > now() GROUP BY owner"
_TIMES = "SELECT count(*) FROM outbox_event WHERE status <> 'published' OR attempts <> 1"


class _Relays:
    """Several relays that publish to one topic."""

    def __init__(self, bed: Bed, topic: str, watch: Watch) -> None:
        self._bed = bed
        self._topic = topic
        self._watch = watch

    def measure(self, count: int, events: int, few: int) -> float:
        """Events per second from the commit of a backlog, by relays that have drained a short one before."""
        fill_postgres(self._bed.url, 0, settled=few)
        told = {"servers": self._bed.servers, "topic": self._topic, "url": self._bed.url, "prefix": "outbox"}
        with ExitStack() as stack:
            children = [
                stack.enter_context(Child("ours", {**told, "note": False}, self._bed.folder)) for _ in range(count)
            ]
            for child in children:
                child.answer()
            wait_until(lambda: self._shared(count), seconds=60, what=f"{count} relays to share the shards")
            self._publish(few)
            found = self._publish(events)
            for child in children:
                child.finish()
        say(f"  postgres-workers: {count} at {found:8,.0f} events/s together")
        return found

    def _shared(self, count: int) -> bool:
        found = [row[0] for row in asyncio.run(self._ask(_SPREAD))]
        return len(found) == count and sum(found) == SHARDS and max(found) - min(found) <= 1

    def _publish(self, events: int) -> float:
        before = self._watch.count()
        begun = asyncio.run(self._commit(events))
        seconds = self._watch.until(before + events) - begun
        wait_until(self._all_settled, seconds=60, what="the last settle")
        # All events are published and there are as many messages as events: each was sent once.
        ((odd,),) = asyncio.run(self._ask(_TIMES))
        copies = self._watch.count() - before - events
        if odd or copies:
            raise RuntimeError(f"{copies} messages too many, and {odd} events not published exactly once")
        return events / seconds

    def _all_settled(self) -> bool:
        return asyncio.run(waiting(self._bed.url, "outbox")) == 0

    async def _commit(self, events: int) -> float:
        connection = await asyncpg.connect(self._bed.url)
        try:
            await connection.execute("CHECKPOINT")
            await add_events(connection, "outbox", events)
            return time.monotonic()
        finally:
            await connection.close()

    async def _ask(self, query: str) -> list[tuple[int, ...]]:
        connection = await asyncpg.connect(self._bed.url)
        try:
            return [tuple(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()


def workers(bed: Bed, scale: Scale) -> list[Row]:
    """Measure one, two and four processes in each round."""
    topic = bed.topic("postgres-workers")
    relays = _Relays(bed, topic, Watch(bed.servers, topic))
    found: dict[int, list[float]] = {count: [] for count in (1, *COUNTS)}
    for _ in range(scale.rounds):
        for count, speeds in found.items():
            speeds.append(relays.measure(count, scale.events, scale.few_waiting))
    bed.drop_topic(topic)
    return [
        Row(f"postgres-workers-{count}", "events/s", found[count], found[1], {"workers": count}, against="one worker")
        for count in COUNTS
    ]
