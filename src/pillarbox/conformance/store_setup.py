"""Shared by the tests of a store: fixtures, and helpers for the steps of a worker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar
from uuid import UUID

import pytest
import pytest_asyncio

from pillarbox.conformance.events import make_event, unique_key
from pillarbox.errors import LeaseLost
from pillarbox.event import Event, Mode, Status, key_hash
from pillarbox.ids import uuid7
from pillarbox.store import Failure, Features, Grant, Hold, HoldMode, Ordered, Ref, Settlement, Store

T = TypeVar("T")

STREAM: Final = "orders"
JOBS: Final = "jobs"
SHARDS: Final = 4
LEASE: Final = 60.0
LONG: Final = 3600.0
PAST: Final = -1.0  # as a duration: over at once, so that no test has to wait
MAX_BYTES: Final = 4_000_000
_NO_ID: Final = UUID(int=0)


class Connect(Protocol):
    """Makes a store, neither opened nor migrated; each call is another connection to the test's own outbox."""

    def __call__(self, *, shards: int = SHARDS) -> Store: ...


class AuditRow(NamedTuple):
    """An action of an operator."""

    by: str
    action: str
    stream: str
    event_id: UUID | None
    consumer: str = ""


class StoreSetup:
    """The methods and fixtures that a database provides."""

    features: ClassVar[Features] = Features()
    durable: ClassVar[bool] = True
    concurrent_writers: ClassVar[bool] = True
    fenced_marks: ClassVar[bool] = True
    wait_seconds: ClassVar[float] = 15.0

    @pytest.fixture
    def connect(self) -> Connect:
        """Override it. Every test has an outbox of its own, which does not exist yet.

        A store that lives in one object gives that same object at every call.
        """
        raise NotImplementedError("give the class a fixture `connect` that makes stores")

    def need_transactions(self) -> None:
        if not self.features.transactions:
            pytest.skip("features say that this store has no transactions")

    async def set_schema_version(self, store: Store, version: int) -> None:
        """Make the outbox look as if another release had migrated it."""
        raise NotImplementedError("write the version where the store keeps it")

    async def damage(self, store: Store, event: Event, how: str) -> None:
        """Write a value into this event's row past the outbox, and past its checks, which no relay can read.

        how: "headers" no mapping of texts, "attempts" the largest number that the column takes."""
        raise NotImplementedError("write it with the database's own means")

    async def remember(self, store: Store, table: str, count: int) -> None:
        """Write rows past the store, as a consumer or a request of this moment does.

        table: "inbox", or "idempotency" for keys, of which some have an answer and some have none."""
        raise NotImplementedError("write them with the database's own means")

    async def audit(self, store: Store) -> Sequence[AuditRow]:
        """All actions of operators, oldest first."""
        return [AuditRow(*row[1:]) for row in reversed(await store.audit(1000))]

    @pytest_asyncio.fixture
    async def store(self, connect: Connect) -> AsyncIterator[Store]:
        store = connect()
        await store.migrate()
        await store.open()
        yield store
        await store.close()

    @pytest_asyncio.fixture
    async def other(self, store: Store, connect: Connect) -> AsyncIterator[Store]:
        """A second connection to the same outbox."""
        other = connect()
        await other.open()
        yield other
        await other.close()

    def key(self, shard: int = 0) -> str:
        """A new key that belongs to the shard."""
        while True:
            key = unique_key()
            if key_hash(_NO_ID, key) % SHARDS == shard:
                return key

    def event(self, *, shard: int = 0, key: str | None = "unique", stream: str = STREAM, **fields: Any) -> Event:
        """An event of the shard, with a key of its own unless given."""
        if key is None and "id" not in fields:
            fields["id"] = next(id for id in iter(uuid7, None) if key_hash(id, None) % SHARDS == shard)
        return make_event(key=self.key(shard) if key == "unique" else key, stream=stream, **fields)

    def events(self, count: int, **fields: Any) -> list[Event]:
        return [self.event(**fields) for _ in range(count)]

    async def join(self, store: Store, stream: str, worker: str, seconds: float) -> None:
        """Serve the stream as this worker."""
        await store.announce(stream, Mode.ORDERED, "memory")
        await store.join(stream, worker, seconds)

    async def own_all(
        self, store: Store, worker: str = "ann", *, stream: str = STREAM, seconds: float = LEASE
    ) -> list[Grant]:
        """All shards, in their order."""
        await self.join(store, stream, worker, LEASE)
        grants = sorted(await store.take(stream, worker, SHARDS, seconds), key=lambda grant: grant.shard)
        assert [grant.shard for grant in grants] == list(range(SHARDS))
        return grants

    async def own(self, store: Store, worker: str = "ann", *, stream: str = STREAM) -> Grant:
        """Shard 0, where the events of these tests are unless they say otherwise."""
        return (await self.own_all(store, worker, stream=stream))[0]

    async def lose(self, store: Store, grant: Grant, worker: str = "bob") -> Grant:
        """The lease runs out and another worker takes the shard."""
        assert list(await store.renew([grant], PAST)) == [grant]
        await self.join(store, grant.stream, worker, LEASE)
        (taken,) = await store.take(grant.stream, worker, SHARDS, LEASE)
        assert taken.shard == grant.shard
        return taken

    async def read(self, store: Store, grant: Grant) -> list[Event]:
        return await read(store, grant, 1000, MAX_BYTES)

    async def read_due(self, store: Store, grant: Grant) -> tuple[str, list[Event]] | None:
        run = await store.read_due(grant, 1000, MAX_BYTES)
        return None if run is None else (run.key, list(run.events))

    async def write(self, store: Store, grant: Grant, *events: Event) -> list[Event]:
        """Write events, and return them as their owner reads them."""
        await store.add(events)
        ids = {event.id for event in events}
        written = [event for event in await self.read(store, grant) if event.id in ids]
        assert len(written) == len(events)
        return written

    async def publish(self, store: Store, grant: Grant, *events: Event) -> None:
        await settle(store, Settlement(grant, published=events))

    async def fail_head(
        self, store: Store, grant: Grant, head: Event, *behind: Event, delay: float | None = PAST, attempts: int = 1
    ) -> None:
        """The head fails, its key is held, and the events behind it wait."""
        assert head.key is not None
        failed = [Failure(head, "refused", attempts)]
        await settle(store, Settlement(grant, failed=failed, hold_keys={head.key: Hold(HoldMode.RETRYING, delay)}))
        if behind:
            await settle(store, Settlement(grant, held=behind))

    async def kill_head(
        self, store: Store, grant: Grant, head: Event, *behind: Event, mode: HoldMode = HoldMode.BLOCKED
    ) -> None:
        """Let the head die; its key is blocked or parked."""
        assert head.key is not None
        dead = [Failure(head, "refused for good", 1)]
        await settle(store, Settlement(grant, dead=dead, hold_keys={head.key: Hold(mode, None, head.id)}))
        if behind:
            await settle(store, Settlement(grant, held=behind))

    async def count(self, store: Store, stream: str = STREAM) -> dict[Status, int]:
        """The states that have events."""
        return {status: n for status, n in (await store.count(stream)).items() if n}

    async def soon(self, ask: Callable[[], Awaitable[T]], wanted: Callable[[T], bool]) -> T:
        """Repeat until the condition is true: a store may search below its floor for late rows only now and then."""
        answer = await ask()
        try:
            async with asyncio.timeout(self.wait_seconds):
                while not wanted(answer):
                    answer = await ask()
        except TimeoutError:
            pytest.fail(f"it never came; the last answer was {str(answer)[:500]}")
        return answer

    async def read_soon(self, store: Store, grant: Grant, count: int) -> list[Event]:
        return await self.soon(lambda: self.read(store, grant), lambda events: len(events) >= count)


async def read(store: Ordered, grant: Grant, limit: int, max_bytes: int) -> list[Event]:
    """The events that the owner of one shard reads."""
    return [event for part in await store.read([grant], limit, max_bytes) for event in part.events]


async def settle(store: Ordered, settlement: Settlement) -> set[str]:
    """Settle one shard; returns the keys that are held now, or raises LeaseLost."""
    held = await store.settle([settlement])
    if settlement.grant.shard not in held:
        raise LeaseLost(f"shard {settlement.grant.shard} is lost")
    return set(held[settlement.grant.shard])


def refs(*events: Event) -> list[Ref]:
    return [Ref(event.id, event.stream) for event in events]


def ids(events: Iterable[Event]) -> list[UUID]:
    return [event.id for event in events]
