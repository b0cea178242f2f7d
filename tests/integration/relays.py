"""Helpers for tests of the relay: an outbox of a test's own, numbered events, and waiting for a condition."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import StoreDown, StoreError
from pillarbox.event import Event, Status, key_hash
from pillarbox.observe import Observer
from pillarbox.publisher import PUBLISHED, Outcome, Publisher, PublisherFeatures
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Fixed, Relay, Stream
from pillarbox.store import Filter, Page, Store
from pillarbox.stores.mongo import MongoStore
from pillarbox.stores.mysql import MysqlStore
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.sqlite import SqliteStore

T = TypeVar("T")

AnyStore = SqlStore | MongoStore  # known to have a URL, for a process of its own
STREAM = "orders"
SHARDS = 4
LEASE = 0.6
WAIT = 20.0  # far above what any condition takes here: it only ends a test that has failed
AT_ONCE = Fixed(0.0)
_numbers = itertools.count(1)
_NO_ID = UUID(int=0)


class Outbox(Protocol):
    """A test's own outbox; each call is another connection to it."""

    def __call__(self, **options: Any) -> Store: ...


class SqlOutbox(Protocol):
    """An outbox whose tables a test looks into."""

    def __call__(self, **options: Any) -> SqlStore: ...


class MongoOutbox(Protocol):
    """An outbox whose collections a test looks into."""

    def __call__(self, **options: Any) -> MongoStore: ...


def sqlite_outbox(folder: Path) -> SqlOutbox:
    path = folder / f"outbox-{next(_numbers)}.db"
    return lambda **options: SqliteStore(str(path), **{"shards": SHARDS, **options})


def postgres_outbox(url: str) -> SqlOutbox:
    prefix = f"relay_{os.getpid()}_{next(_numbers)}"
    return lambda **options: PostgresStore(url, **{"prefix": prefix, "shards": SHARDS, **options})


def mysql_outbox(url: str) -> SqlOutbox:
    prefix = f"relay_{os.getpid()}_{next(_numbers)}"
    return lambda **options: MysqlStore(url, **{"prefix": prefix, "shards": SHARDS, **options})


def mongo_outbox(url: str) -> MongoOutbox:
    prefix = f"relay_{os.getpid()}_{next(_numbers)}"
    own = url.replace("/?", "/relays?") if "/?" in url else f"{url}relays"
    return lambda **options: MongoStore(own, **{"prefix": prefix, "shards": SHARDS, **options})


class InAnHour:
    """What prune needs of a store, an hour from now."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def prune_published(self, keep_seconds: float, limit: int, after: Any = None) -> Page:
        return await self._store.prune_published(keep_seconds - 3600, limit, after)

    async def prune_dead(self, keep_seconds: float, limit: int) -> int:
        return await self._store.prune_dead(keep_seconds - 3600, limit)

    async def prune_inbox(self, keep_seconds: float, limit: int) -> int:
        return await self._store.prune_inbox(keep_seconds - 3600, limit)

    async def prune_idempotency(self, keep_seconds: float, limit: int) -> int:
        return await self._store.prune_idempotency(keep_seconds - 3600, limit)


def stream(to: Any, name: str = STREAM, **settings: Any) -> Stream:
    """A stream that looks again soon, and whose leases outlast the test, however slow, unless it asks for others."""
    return Stream(name, to, **{"poll": 0.02, "poll_limit": 0.1, "retry": AT_ONCE, "lease": 3 * WAIT, **settings})


def relay(store: Store, *streams: Stream, **settings: Any) -> Relay:
    return Relay(store, streams, **{"grace": 5.0, **settings})


def key_of(shard: int, *, shards: int = SHARDS) -> str:
    """A new key of that shard."""
    for number in _numbers:
        key = f"key-{number}"
        if key_hash(_NO_ID, key) % shards == shard:
            return key
    raise AssertionError


def numbered(key: str | None, count: int, *, first: int = 1, **fields: Any) -> list[Event]:
    """Events of one key whose payload says which one they are."""
    return [
        make_event(key=key, payload=json.dumps({"n": n}).encode(), **{"stream": STREAM, **fields})
        for n in range(first, first + count)
    ]


def mixed(keys: Sequence[str], count: int, *, first: int = 1, **fields: Any) -> list[Event]:
    """``count`` events of each key, taking turns."""
    lists = [numbered(key, count, first=first, **fields) for key in keys]
    return [event for row in zip(*lists, strict=True) for event in row]


def number(event: Event) -> int:
    place: int = json.loads(event.payload)["n"]
    return place


def by_key(deliveries: Iterable[Event]) -> dict[str | None, list[int]]:
    found: dict[str | None, list[int]] = defaultdict(list)
    for event in deliveries:
        found[event.key].append(number(event))
    return dict(found)


def first_deliveries(deliveries: Iterable[Event]) -> dict[str | None, list[int]]:
    return {key: list(dict.fromkeys(numbers)) for key, numbers in by_key(deliveries).items()}


def copies(deliveries: Iterable[Event]) -> int:
    """How many deliveries were not the first of their event."""
    return sum(count - 1 for count in Counter(event.id for event in deliveries).values())


def in_order(keys: Iterable[str | None], count: int) -> dict[str | None, list[int]]:
    return {key: list(range(1, count + 1)) for key in keys}


async def eventually(ask: Callable[[], Awaitable[T]], wanted: Callable[[T], bool] = bool, seconds: float = WAIT) -> T:
    """Ask until the answer is what is wanted."""
    answer = await ask()
    try:
        async with asyncio.timeout(seconds):
            while not wanted(answer):
                await asyncio.sleep(0.01)
                answer = await ask()
    except TimeoutError:
        raise AssertionError(f"it did not come in {seconds:g} s; the last answer was {answer!r}"[:2000]) from None
    return answer


async def until(condition: Callable[[], object], seconds: float = WAIT) -> None:
    async def ask() -> bool:
        return bool(condition())

    await eventually(ask, seconds=seconds)


async def counts(store: Store, name: str = STREAM) -> dict[Status, int]:
    return {status: n for status, n in (await store.count(name)).items() if n}


async def settled(store: Store, wanted: dict[Status, int], name: str = STREAM, seconds: float = WAIT) -> None:
    """Until the stream has exactly these."""

    async def ask() -> dict[Status, int]:
        try:
            return await counts(store, name)
        except StoreDown:
            return {}  # a test may have taken the database away

    await eventually(ask, lambda found: found == wanted, seconds)


async def query(store: SqlStore, text: str, **values: Any) -> list[Any]:
    """A look into the tables, past the contract."""
    return await probe_of(store).query(text, **values)


async def execute(store: SqlStore, text: str, **values: Any) -> int:
    return await probe_of(store).execute(text, **values)


async def attempts(store: Store) -> list[int]:
    """What was charged to each event that is not dead, in the order of their ids."""
    found = await store.find(Filter(), 100_000, newest_first=False)
    return [each.event.attempts for each in found if each.event.status is not Status.DEAD]


async def move(store: Store, name: str, instant: str, seconds: float, **where: Any) -> None:
    """Set an instant to so many seconds from now, in the rows that are equal to these."""
    await probe_of(store).move(name, instant, seconds, **where)


async def owners(store: Store, name: str = STREAM) -> dict[str | None, int]:
    """How many shards each worker owns."""
    return dict(await probe_of(store).owners(name))


def sharing(relays: Sequence[Relay], shares: Sequence[int]) -> Callable[[dict[str | None, int]], bool]:
    """Whether these relays own so many shards each, in any order, and nobody else owns any."""

    def agreed(found: dict[str | None, int]) -> bool:
        return found.keys() == {each.name for each in relays} and sorted(found.values()) == sorted(shares)

    return agreed


def cut(store: Store, patch: pytest.MonkeyPatch) -> None:
    """From here on this store's connection reaches nothing, as if its machine were off the network."""
    probe_of(store).cut(patch)


def worker_of(running: Relay, name: str = STREAM) -> Any:
    """The worker of a stream, behind the relay's public face; None before it serves."""
    supervisor = running._supervisor
    return None if supervisor is None else supervisor.runners[name].worker


async def lease_in_doubt(running: Relay) -> None:
    """Until the worker may not publish, because its leases were not renewed for too long."""
    shards = worker_of(running).ownership.shards.values()
    await until(lambda: all(shard.publish_until < time.monotonic() for shard in shards))


@asynccontextmanager
async def in_the_midst(to: MemoryPublisher) -> AsyncIterator[None]:
    """Within the block, calls of the destination are under way and none ends: the rest of the work is still to do."""
    to.hold()
    await to.wait_until_held()
    yield
    to.release()


class CircuitState(Observer):
    """Knows the state of a relay's circuit."""

    state = "closed"

    def circuit_changed(self, stream: str, state: str) -> None:
        self.state = state


class Shared(MemoryPublisher):
    """A destination that several relays publish to: it stays open when one of them stops."""

    async def close(self) -> None:
        """Its relays come and go."""


class Gate(Publisher):
    """A destination in memory that stops before each call until it is let through."""

    description = "gate"

    def __init__(self, *, at_once: int = 4) -> None:
        self._features = PublisherFeatures(calls=at_once)
        self.deliveries: list[Event] = []
        self.calls = 0
        self._places = asyncio.Semaphore(0)

    def let(self, calls: int) -> None:
        for _ in range(calls):
            self._places.release()

    @property
    def features(self) -> PublisherFeatures:
        return self._features

    async def close(self) -> None:
        self.let(10_000)

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        self.calls += 1
        await self._places.acquire()
        self.deliveries += batch
        return [PUBLISHED] * len(batch)


class RelayProcess:
    """A relay in a process of its own, which writes what it publishes into a ledger."""

    _process: subprocess.Popen[bytes]

    def __init__(self, store: AnyStore, ledger: Path, **settings: Any) -> None:
        probe = probe_of(store)
        self.ledger = ledger
        place = {"url": probe.url, "prefix": probe.prefix, "ledger": str(ledger), "stream": STREAM}
        self._order = json.dumps(place | settings)

    def start(self) -> "RelayProcess":
        program = Path(__file__).with_name("relay_process.py")
        self._process = subprocess.Popen([sys.executable, str(program), self._order], stderr=subprocess.DEVNULL)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def suspend(self) -> None:
        """Return when it stands still: a thread may end what it does in the kernel first, and have a lock then."""
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    async def ended(self) -> int:
        await until(lambda: not self.running)
        return self._process.wait()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        if self.running:
            self.send(signal.SIGCONT)
            self.send(signal.SIGKILL)
        self._process.wait()


class Line(NamedTuple):
    """One delivery of the ledger."""

    pid: int
    id: str
    key: str | None
    n: int


def ledger(path: Path) -> list[Line]:
    if not path.exists():
        return []
    # The last line may be half of one: its writer was killed.
    return [Line(**json.loads(text)) for text in path.read_text().split("\n")[:-1]]


def ledger_by_key(lines: Iterable[Line]) -> dict[str | None, list[int]]:
    found: dict[str | None, dict[int, None]] = defaultdict(dict)
    for line in lines:
        found[line.key][line.n] = None
    return {key: list(numbers) for key, numbers in found.items()}


def ledger_copies(lines: Iterable[Line]) -> int:
    return sum(count - 1 for count in Counter(line.id for line in lines).values())


async def refused(store: Store) -> str:
    """What a relay says that cannot start: one sentence."""
    with pytest.raises(StoreError) as caught:
        async with relay(store, stream(MemoryPublisher())) as running:
            await running.ready()
    assert "\n" not in str(caught.value)
    return str(caught.value)
