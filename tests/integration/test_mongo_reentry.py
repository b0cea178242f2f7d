"""One clock gives the seq of inserts and of re-entries: unique and growing, also in transactions."""

import asyncio
import random
from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.conformance.store_setup import read, refs, settle
from pillarbox.event import Event, Mode
from pillarbox.store import Failure, Filter, Grant, Settlement
from pillarbox.stores.mongo import MongoStore
from servers import Mongo, MongoStandalone
from tests.integration.relays import STREAM, MongoOutbox, key_of, mongo_outbox, numbered

pytestmark = pytest.mark.asyncio

KEYS = [key_of(shard) for shard in range(4)]
SCHEDULED = 200
DEAD = 40
PLAIN = 60


@pytest.fixture(params=["replica set", "standalone"])
def either(request: pytest.FixtureRequest) -> MongoOutbox:
    server: Mongo | MongoStandalone = request.getfixturevalue(
        "mongo" if request.param == "replica set" else "mongo_standalone"
    )
    return mongo_outbox(server.url)


def scheduled(count: int) -> list[Event]:
    """Events of few keys whose instants have come. They are not in order of their instants, and some are equal."""
    now, chance = datetime.now(UTC).replace(microsecond=0), random.Random(7)
    return [
        numbered(chance.choice(KEYS), 1, available_at=now - timedelta(minutes=chance.randrange(1, count // 2)))[0]
        for _ in range(count)
    ]


async def grants_of(store: MongoStore) -> list[Grant]:
    await store.announce(STREAM, Mode.ORDERED, "memory")
    return list(await store.take(STREAM, "ann", 4, 600))


async def pending(store: MongoStore, grants: list[Grant]) -> list[Event]:
    """All pending events, in order of seq."""
    found = [event for grant in grants for event in await read(store, grant, 10_000, 10**8)]
    return sorted(found, key=lambda event: event.seq)


async def test_re_entries_replays_and_writers_at_once_are_numbered_by_one_clock(either: MongoOutbox) -> None:
    ann, bob, eve = either(), either(), either()
    await ann.migrate()
    for store in (ann, bob, eve):
        await store.open()
    grants = await grants_of(ann)
    dead = numbered(KEYS[0], DEAD)
    await ann.add(dead)
    owner = next(grant for grant in grants if grant.shard == 0)
    dead = await read(ann, owner, DEAD, 10**6)
    await settle(ann, Settlement(owner, dead=[Failure(event, "refused", 1) for event in reversed(dead)]))
    waiting = scheduled(SCHEDULED)
    await ann.add(waiting)
    before = max(found.event.seq for found in await ann.find(Filter(), 10_000))

    async def reenter(store: MongoStore) -> None:
        while await store.reenter_due(STREAM, 30):
            pass

    async def write(store: MongoStore, key: str) -> None:
        for event in numbered(key, PLAIN):
            async with store.transaction() as tx:
                await store.add([event], tx)

    async def replay(store: MongoStore) -> None:
        for first in range(0, DEAD, 8):
            assert await store.replay(refs(*reversed(dead[first : first + 8])), "olga") == 8

    await asyncio.gather(
        reenter(ann),
        reenter(bob),
        replay(eve),
        *(write(store, store_key) for store, store_key in zip((ann, bob, eve), KEYS[1:], strict=True)),
    )
    found = await pending(ann, grants)
    assert len(found) == SCHEDULED + DEAD + 3 * PLAIN
    seqs = [event.seq for event in found]
    assert len(set(seqs)) == len(seqs)
    assert min(seqs) > before, "each took a place behind all that were there"
    entered = [event for event in found if event.available_at is not None]
    # Those with the same instant come in the order in which they were written.
    assert [event.id for event in entered] == [
        event.id for event in sorted(waiting, key=lambda event: event.available_at or event.created_at)
    ]
    for letters in (dead[first : first + 8] for first in range(0, DEAD, 8)):
        places = [next(event.seq for event in found if event.id == letter.id) for letter in letters]
        assert places == sorted(places), "in their old order"
    for store in (ann, bob, eve):
        await store.close()


async def test_a_replay_that_is_rolled_back_leaves_the_dead_letter(mg: MongoOutbox, store: MongoStore) -> None:
    """An event that was written again cannot come back, and the other letter of the call stays dead too."""
    (grant,) = [grant for grant in await grants_of(store) if grant.shard == 0]
    await store.add(numbered(KEYS[0], 2))
    dead, other = await read(store, grant, 10, 10**6)
    await settle(store, Settlement(grant, dead=[Failure(event, "refused", 1) for event in (dead, other)]))
    await store.add([dead])
    with pytest.raises(Exception, match="already"):
        await store.replay(refs(dead, other), "olga")
    assert {letter.event.id for letter in await store.dead_letters()} == {dead.id, other.id}
    assert not await store.audit(10)
