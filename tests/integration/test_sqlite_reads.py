"""A read that found nothing on SQLite is not run again until somebody has written."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta

import pytest
import pytest_asyncio

from pillarbox.conformance.events import make_event
from pillarbox.conformance.probes import probe_of
from pillarbox.event import Event, Mode
from pillarbox.store import Failure, Grant, Ref, Settlement
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sqlite.database import SqliteDatabase
from tests.integration.relays import SHARDS, STREAM, SqlOutbox, key_of

pytestmark = pytest.mark.asyncio

MAX_BYTES = 10**6


class Reader:
    """A store that reads its shards, and the statements that it ran on events."""

    def __init__(self, store: SqlStore, grants: Sequence[Grant]) -> None:
        self.store, self.grants = store, grants
        self._event = probe_of(store).tables["event"]
        self.ran: list[str] = []

    def told(self, text: str) -> None:
        if self._event in text:
            self.ran.append(text)

    async def read(self, shards: Sequence[int] = range(SHARDS)) -> list[Event]:
        grants = [grant for grant in self.grants if grant.shard in shards]
        return [event for part in await self.store.read(grants, 10, MAX_BYTES) for event in part.events]

    async def has_nothing(self, shards: Sequence[int] = range(SHARDS)) -> None:
        """It has read these shards, and would not touch the events to read them again."""
        assert await self.read(shards) == []
        self.ran.clear()
        for _ in range(3):
            assert await self.read(shards) == []
        assert self.ran == []


@pytest_asyncio.fixture
async def reader(store: SqlStore) -> Reader:
    await store.announce(STREAM, Mode.ORDERED, "memory")
    await store.join(STREAM, "ann", 60)
    reader = Reader(store, sorted(await store.take(STREAM, "ann", SHARDS, 60)))
    assert isinstance(store.database, SqliteDatabase)
    await store.database.trace(reader.told)
    return reader


@pytest_asyncio.fixture
async def other(sqlite: SqlOutbox) -> AsyncIterator[SqlStore]:
    """Another connection to the same file."""
    store = sqlite()
    await store.open()
    yield store
    await store.close()


def event(shard: int = 0) -> Event:
    return make_event(stream=STREAM, key=key_of(shard))


async def test_without_a_commit_the_events_are_not_touched(sqlite: SqlOutbox, store: SqlStore, reader: Reader) -> None:
    await reader.has_nothing()
    await reader.has_nothing([1])


async def test_an_event_that_another_connection_commits_is_found_at_once(
    sqlite: SqlOutbox, store: SqlStore, other: SqlStore, reader: Reader
) -> None:
    for shards in (range(SHARDS), [0]):
        await reader.has_nothing(shards)
        async with other.transaction() as tx:
            await other.add([new := event()], tx)
            assert await reader.read(shards) == []
        assert [each.id for each in await reader.read(shards)] == [new.id]
        await store.settle([Settlement(reader.grants[0], published=await reader.read())])


async def _add(store: SqlStore, made: Event) -> None:
    await store.add([made])


async def _add_in_a_transaction(store: SqlStore, made: Event) -> None:
    async with store.transaction() as tx:
        await store.add([made], tx)


@pytest.mark.parametrize("add", [_add, _add_in_a_transaction])
async def test_an_event_that_the_store_writes_itself_is_found_at_once(
    sqlite: SqlOutbox, store: SqlStore, reader: Reader, add: Callable[[SqlStore, Event], Awaitable[None]]
) -> None:
    await reader.has_nothing()
    await add(store, new := event())
    assert [each.id for each in await reader.read()] == [new.id]


async def test_an_event_that_comes_back_is_found_at_once(sqlite: SqlOutbox, store: SqlStore, reader: Reader) -> None:
    await store.add([event()])
    (died,) = await reader.read()
    await store.settle([Settlement(reader.grants[0], dead=[Failure(died, "refused", 1)])])
    await reader.has_nothing()
    await store.replay([Ref(died.id, STREAM)], "olga")
    assert [each.id for each in await reader.read()] == [died.id]


async def test_a_scheduled_event_is_found_when_it_enters(sqlite: SqlOutbox, store: SqlStore, reader: Reader) -> None:
    past = datetime.now(UTC) - timedelta(minutes=1)
    await store.add([scheduled := event()._replace(available_at=past)])
    await reader.has_nothing()
    assert await store.reenter_due(STREAM, 10) == 1
    assert [each.id for each in await reader.read()] == [scheduled.id]


async def test_other_shards_and_another_fence_are_read(
    sqlite: SqlOutbox, store: SqlStore, other: SqlStore, reader: Reader
) -> None:
    await store.add([event(1)])
    await reader.has_nothing([0])
    assert len(await reader.read([0, 1])) == 1
    stale = [grant._replace(token=grant.token + 100) for grant in reader.grants]
    assert list(await store.read(stale, 10, MAX_BYTES)) == []
    assert len(await reader.read()) == 1


@pytest.mark.parametrize("by_another", [True, False])
async def test_a_pause_that_ends_is_seen_at_once(
    sqlite: SqlOutbox, store: SqlStore, other: SqlStore, reader: Reader, by_another: bool
) -> None:
    operator = other if by_another else store
    await store.add([event()])
    await operator.pause(STREAM, "olga")
    await reader.has_nothing()
    await operator.resume(STREAM, "olga")
    assert len(await reader.read()) == 1


async def test_a_store_that_was_opened_again_remembers_nothing(
    sqlite: SqlOutbox, store: SqlStore, other: SqlStore, reader: Reader
) -> None:
    # Both connections of this store are new when they read, and so they count alike.
    await other.close()
    await other.open()
    assert list(await other.read(reader.grants, 10, MAX_BYTES)) == []
    await other.close()
    await store.add([event()])
    await other.open()
    assert len(await other.read(reader.grants, 10, MAX_BYTES)) == 1
