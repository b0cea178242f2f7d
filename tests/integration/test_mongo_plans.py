"""The cost of the frequent commands of the store on MongoDB: they are recorded and explained by the server."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from pillarbox.conformance.mongo_probe import MongoProbe
from pillarbox.conformance.store_setup import read, settle
from pillarbox.event import Mode
from pillarbox.ids import uuid7
from pillarbox.store import Failure, Filter, Grant, Settlement
from pillarbox.stores.mongo import MongoStore
from pillarbox.stores.mongo.database import CODEC
from servers import Mongo
from tests.integration.mongos import Recorder
from tests.integration.relays import STREAM, MongoOutbox, key_of, mongo_outbox, move, numbered

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVENTS = 20_000
HELD = 2_000
BATCH = 50
HOT = key_of(0)
_OWN = ("$db", "lsid", "$clusterTime", "txnNumber", "startTransaction", "autocommit", "readConcern", "maxTimeMS")


class Recorded:
    """A large outbox with a held hot key, nine tenths of it settled, and the commands that its store sends."""

    def __init__(self, store: MongoStore, recorder: Recorder, grants: Sequence[Grant]) -> None:
        self.store, self.recorder, self.grants = store, recorder, grants
        self.grant = grants[0]

    async def explain(self, name: str, collection: str = "event") -> list[dict[str, Any]]:
        """The statistics of the recorded commands of this name on this collection."""
        own = self.store.database.names[collection]
        found = [command for command in self.recorder.take(name) if command[name] == own]
        assert found, f"no {name} on {own} was sent"
        return [await self._explain(command) for command in found]

    async def _explain(self, command: dict[str, Any]) -> dict[str, Any]:
        what = {field: value for field, value in command.items() if field not in _OWN}
        answer: dict[str, Any] = await self.store.database.opened.command(
            {"explain": what, "verbosity": "executionStats"}, codec_options=CODEC
        )
        self.recorder.sent.clear()
        return answer


def nodes(plan: Any) -> Iterator[dict[str, Any]]:
    if isinstance(plan, dict):
        yield plan
        for name, child in plan.items():
            # The answer has the rejected plans too.
            if name not in ("rejectedPlans", "allPlansExecution"):
                yield from nodes(child)
    elif isinstance(plan, list):
        for child in plan:
            yield from nodes(child)


def cost(explained: dict[str, Any]) -> tuple[int, int, set[str]]:
    """Keys and documents examined, and the names of the indexes; COLLSCAN if the whole collection was read."""
    found = list(nodes(explained))
    stats = [each for each in found if "totalKeysExamined" in each]
    indexes = {each["indexName"] for each in found if "indexName" in each}
    indexes |= {"COLLSCAN" for each in found if each.get("stage") == "COLLSCAN"}
    return sum(each["totalKeysExamined"] for each in stats), sum(each["totalDocsExamined"] for each in stats), indexes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large(mongo: Mongo) -> AsyncIterator[Recorded]:
    outbox: MongoOutbox = mongo_outbox(mongo.url)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        store = outbox()
        await store.migrate()
        await store.open()
    for shard in range(4):
        await store.add(numbered(key_of(shard), EVENTS // 4))
    events = store.database.collection("event")
    old = [each["_id"] async for each in events.find({}, {"_id": 1}, sort=[("seq", 1)])]
    settled = {"_id": {"$in": [each for place, each in enumerate(old) if place % 10]}}
    await events.update_many(settled, [{"$set": {"status": "published", "published_at": "$$NOW"}}])
    await store.add(numbered(HOT, HELD))
    await store.add(numbered(key_of(1), HELD, stream="later"))
    later = {"status": "scheduled", "next_attempt_at": {"$add": ["$$NOW", 3_600_000]}}
    await events.update_many({"stream": "later"}, [{"$set": later}])
    await store.announce(STREAM, Mode.ORDERED, "memory")
    await store.join(STREAM, "ann", 600)
    grants = sorted(await store.take(STREAM, "ann", 4, 600), key=lambda grant: grant.shard)
    head = await events.find_one({"key": HOT}, {"_id": 1}, sort=[("seq", 1)])
    assert head is not None
    await events.update_many({"key": HOT}, {"$set": {"status": "held"}})
    await store.database.collection("held_key").insert_one(
        {"stream": STREAM, "shard": 0, "key": HOT, "mode": "retrying"}
    )
    await move(store, "held_key", "next_attempt_at", 0.0)
    recorder.sent.clear()
    yield Recorded(store, recorder, grants)
    await store.close()


async def test_a_read_walks_the_ready_index_from_its_head(large: Recorded) -> None:
    assert len(await read(large.store, large.grant, BATCH, 10**6)) == BATCH
    (explained,) = await large.explain("find")
    keys, documents, indexes = cost(explained)
    assert indexes == {"ready"}
    assert keys <= BATCH + 1
    assert documents <= BATCH


async def test_a_read_of_several_shards_walks_the_ready_index_without_sorting(large: Recorded) -> None:
    counts = []
    for limit in (BATCH, 4 * EVENTS):
        parts = await large.store.read(large.grants, limit, 10**7)
        counts.append({part.shard: len(part.events) for part in parts})
        (explained,) = await large.explain("aggregate")
        keys, documents, indexes = cost(explained)
        assert indexes == {"ready", "shard", "_id_"}, "of events, leases and the stream"
        assert keys <= sum(counts[-1].values()) + 4 * len(large.grants) + 1
        assert documents <= sum(counts[-1].values()) + len(large.grants) + 1
        assert not [each for each in nodes(explained) if str(each.get("stage", "")).startswith("SORT")]
    assert counts[0] == {0: BATCH}
    assert counts[1].keys() == {0, 1, 2, 3}


async def test_a_turn_on_several_shards_is_three_commands_and_a_read_is_one(large: Recorded) -> None:
    parts = await large.store.read(large.grants, EVENTS, 10**7)
    assert [next(iter(command)) for command in large.recorder.sent] == ["aggregate"]
    large.recorder.sent.clear()
    settlements = [
        Settlement(grant, published=part.events[:2]) for grant, part in zip(large.grants, parts, strict=True)
    ]
    assert len(await large.store.settle(settlements)) == 4
    assert [next(iter(command)) for command in large.recorder.sent] == ["find", "update"]
    large.recorder.sent.clear()
    assert not await large.store.read([grant._replace(stream="empty") for grant in large.grants], BATCH, 10**6)
    assert [next(iter(command)) for command in large.recorder.sent] == ["aggregate"]
    large.recorder.sent.clear()
    assert len(await large.store.read(large.grants, BATCH, 1)) == 1
    sent = [command.get("aggregate", "") for command in large.recorder.sent]
    names = large.store.database.names
    assert [sent[0], sent[-1]] == [names["event"], names["lease"]], "after a cut the leases are asked for by themselves"
    large.recorder.sent.clear()


async def test_a_due_key_is_read_by_the_held_index(large: Recorded) -> None:
    run = await large.store.read_due(large.grant, BATCH, 10**6)
    assert run is not None
    assert len(run.events) == BATCH
    (explained,) = await large.explain("find")
    keys, documents, indexes = cost(explained)
    assert indexes == {"held"}
    assert keys <= 2 * BATCH
    assert documents <= BATCH


async def test_a_poll_looks_at_few_events(large: Recorded) -> None:
    await large.store.poll(STREAM, "ann", [large.grant])
    (explained,) = await large.explain("aggregate", "stream")
    keys, documents, indexes = cost(explained)
    assert "COLLSCAN" not in indexes
    assert {"ready", "due"} <= indexes
    assert keys <= 300
    assert documents <= 300


async def test_events_scheduled_for_later_cost_a_poll_nothing(large: Recorded) -> None:
    await large.store.poll("later", "ann", None)
    (explained,) = await large.explain("aggregate", "stream")
    assert cost(explained)[0] <= 50


async def test_re_entry_finds_only_what_is_due(large: Recorded) -> None:
    assert await large.store.reenter_due("later", BATCH) == 0
    (explained,) = await large.explain("find")
    keys, documents, indexes = cost(explained)
    assert indexes == {"due"}
    assert keys <= 2
    assert documents == 0


async def test_a_claim_walks_the_ready_index(large: Recorded) -> None:
    claims = await large.store.claim(STREAM, 2, "ann", BATCH, 600)
    assert len(claims) == BATCH
    first, second = await large.explain("find")
    keys, _, indexes = cost(first)
    assert indexes == {"ready"}
    assert keys <= BATCH + 1
    assert cost(second)[1] <= BATCH
    await large.store.rescue(STREAM, 3600, BATCH)
    (explained,) = await large.explain("find")
    keys, _, indexes = cost(explained)
    assert indexes == {"leased"}
    assert keys <= BATCH + 1


async def test_unserved_streams_are_found_in_a_step_for_each(large: Recorded) -> None:
    assert await large.store.unserved() == ["later"]
    for explained in await large.explain("find"):
        keys, documents, indexes = cost(explained)
        assert "COLLSCAN" not in indexes
        assert keys <= 2
        assert documents <= 1


async def test_a_settle_goes_by_the_primary_key(large: Recorded) -> None:
    events = await read(large.store, large.grant, BATCH, 10**6)
    await settle(large.store, Settlement(large.grant, published=events))
    (explained,) = await large.explain("update")
    keys, documents, indexes = cost(explained)
    assert indexes == {"_id_"}
    assert keys <= 2 * BATCH
    assert documents == BATCH


async def test_an_id_is_found_in_all_streams_by_the_primary_key(large: Recorded) -> None:
    (event,) = await read(large.store, large.grant, 1, 10**6)
    await large.store.add([event._replace(stream="later")])
    assert len(await large.store.find_by_id(event.id)) == 2
    assert len(await large.store.find(Filter(ids=[event.id, uuid7()]), 10)) == 2
    for explained in await large.explain("aggregate"):
        keys, documents, indexes = cost(explained)
        assert indexes == {"_id_"}
        assert keys <= 5
        assert documents == 2


async def test_an_index_by_aggregate_is_made_where_it_is_asked_for(large: Recorded) -> None:
    store = large.store
    assert "aggregate" not in await store.database.collection("event").index_information()
    assert list(await store.migrate(aggregate_index=True)) == ["aggregate_index"]
    assert list(await store.migrate(aggregate_index=True)) == []
    await store.add(
        numbered("k", 3, stream="later", aggregate_id="7", aggregate_version=2) + numbered("k", 1, aggregate_id="8")
    )
    large.recorder.sent.clear()
    versions = {"aggregate_id": "7", "aggregate_version": {"$gte": 2}}
    assert len(await store.database.collection("event").find(versions).to_list()) == 3
    (explained,) = await large.explain("find")
    assert cost(explained) == (3, 3, {"aggregate"})


async def test_a_page_of_prune_goes_by_the_primary_key(large: Recorded) -> None:
    page = await large.store.prune_published(-60, BATCH)
    assert page.deleted > 0
    (explained,) = await large.explain("find")
    keys, documents, indexes = cost(explained)
    assert indexes == {"_id_"}
    assert keys <= BATCH + 1
    assert documents <= BATCH


@pytest.mark.parametrize("table", ["inbox", "idempotency"])
async def test_a_prune_of_what_was_remembered_goes_by_age(large: Recorded, table: str) -> None:
    store = large.store
    await MongoProbe(store).remember(table, 2 * BATCH)
    prune = store.prune_inbox if table == "inbox" else store.prune_idempotency
    large.recorder.sent.clear()
    assert await prune(3600, BATCH) == 0
    assert cost((await large.explain("find", table))[0]) == (0, 0, {"age"}), "nothing is old"
    large.recorder.sent.clear()
    assert await prune(-60, BATCH) == BATCH
    assert cost((await large.explain("find", table))[0]) == (BATCH, BATCH, {"age"})


async def test_a_prune_of_dead_letters_reads_each_once(large: Recorded) -> None:
    store = large.store
    events = await read(store, large.grant, 4 * BATCH, 10**6)
    await settle(store, Settlement(large.grant, dead=[Failure(event, "$bad", 1) for event in events]))
    large.recorder.sent.clear()
    assert await store.prune_dead(-60, BATCH) == BATCH
    (explained,) = await large.explain("aggregate", "dead_letter")
    keys, documents, indexes = cost(explained)
    assert "died" in indexes
    assert "COLLSCAN" not in indexes
    # A pipeline reads a few megabytes beyond its limit, but no document twice.
    assert keys <= 4 * BATCH
    assert documents <= 4 * BATCH
