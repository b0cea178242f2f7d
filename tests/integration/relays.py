"""What the tests of the relay share: an outbox of their own, events with a place in their key, and patience."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import UUID

import pytest

from pillarbox.conformance.events import make_event
from pillarbox.errors import StoreDown, StoreError
from pillarbox.event import Event, Status, key_hash
from pillarbox.publisher import PUBLISHED, Outcome, PublisherFeatures
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Fixed, Relay, Stream
from pillarbox.store import Filter, Store
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


def stream(to: Any, name: str = STREAM, **settings: Any) -> Stream:
    """A stream that looks again soon, and whose leases run out soon when asked for."""
    return Stream(name, to, **{"poll_seconds": 0.02, "poll_limit_seconds": 0.1, "retry": AT_ONCE, **settings})


def relay(store: Store, *streams: Stream, **settings: Any) -> Relay:
    return Relay(store, streams, **{"grace_seconds": 5.0, **settings})


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
    return [tuple(row) for row in await store._db.fetch(store._statement(text), **values)]


async def execute(store: SqlStore, text: str, **values: Any) -> int:
    return await store._db.execute(store._statement(text), **values)


async def attempts(store: Store) -> list[int]:
    """What was charged to each event that is not dead, in the order of their ids."""
    found = await store.find(Filter(), 100_000, newest_first=False)
    return [each.event.attempts for each in found if each.event.status is not Status.DEAD]


async def move(store: Store, name: str, instant: str, seconds: float, **where: Any) -> None:
    """Set an instant of what is equal to these to so many seconds from now."""
    if isinstance(store, MongoStore):
        later = {"$add": ["$$NOW", int(seconds * 1000)]}
        query = {"_id" if field == "id" else field: value for field, value in where.items()}
        await store._db.collection(name).update_many(query, [{"$set": {instant: later}}])
        return
    assert isinstance(store, SqlStore)
    chosen = " AND ".join(["1 = 1", *(f"{field} = :{field}" for field in where)])
    await execute(
        store, f"UPDATE {{{name}}} SET {instant} = {{later:seconds}} WHERE {chosen}", seconds=seconds, **where
    )


async def owners(store: Store, name: str = STREAM) -> dict[str | None, int]:
    """How many shards each worker owns."""
    if isinstance(store, MongoStore):
        leases = await store._db.collection("lease").find({"stream": name}).to_list()
        return dict(Counter(lease["owner"] for lease in leases))
    assert isinstance(store, SqlStore)
    rows = await query(store, "SELECT owner FROM {lease} WHERE stream = :stream", stream=name)
    return dict(Counter(row[0] for row in rows))


def sharing(relays: Sequence[Relay], shares: Sequence[int]) -> Callable[[dict[str | None, int]], bool]:
    """Whether these relays own so many shards each, in any order, and nobody else owns any."""

    def agreed(found: dict[str | None, int]) -> bool:
        return found.keys() == {each.name for each in relays} and sorted(found.values()) == sorted(shares)

    return agreed


def cut(store: Store, patch: pytest.MonkeyPatch) -> None:
    """From here on this store's connection reaches nothing, as if its machine were off the network."""
    if isinstance(store, MongoStore):
        patch.setattr(store._db, "_database", None)
        return
    assert isinstance(store, SqlStore)

    async def unreachable(*_: Any, **__: Any) -> Any:
        raise StoreDown("cut off")

    @asynccontextmanager
    async def no_transaction() -> AsyncIterator[Any]:
        yield await unreachable()

    for name in ("fetch", "execute", "execute_many"):
        patch.setattr(store._db, name, unreachable)
    patch.setattr(store._db, "transaction", no_transaction)


class Shared(MemoryPublisher):
    """A destination that several relays publish to: it stays open when one of them stops."""

    async def close(self) -> None:
        """Its relays come and go."""


class Gate:
    """A destination in memory that stops before each call until it is let through."""

    def __init__(self, *, at_once: int = 4) -> None:
        self.features = PublisherFeatures(calls=at_once)
        self.description = "gate"
        self.deliveries: list[Event] = []
        self.calls = 0
        self._places = asyncio.Semaphore(0)

    def let(self, calls: int) -> None:
        for _ in range(calls):
            self._places.release()

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        self.let(10_000)

    async def publish(self, events: Sequence[Event]) -> Sequence[Outcome]:
        self.calls += 1
        await self._places.acquire()
        self.deliveries += events
        return [PUBLISHED] * len(events)


class RelayProcess:
    """A relay in a process of its own, which writes what it publishes into a ledger."""

    def __init__(self, store: AnyStore, ledger: Path, **settings: Any) -> None:
        database: Any = store._db
        url = f"sqlite:///{database.path}" if isinstance(store, SqliteStore) else database._url
        self.ledger = ledger
        self._order = json.dumps(
            {
                "url": url,
                "prefix": store._names.prefix,
                "ledger": str(ledger),
                "stream": STREAM,
                **settings,
            }
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "RelayProcess":
        program = Path(__file__).with_name("relay_process.py")
        self._process = subprocess.Popen([sys.executable, str(program), self._order], stderr=subprocess.PIPE)
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> int:
        process = self._process
        assert process is not None
        await until(lambda: process.poll() is not None)
        assert process.stderr is not None
        process.stderr.close()
        return process.returncode

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        if self._process is not None:
            if self.running:
                self.send(signal.SIGCONT)
                self.send(signal.SIGKILL)
            self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()


class Line:
    """One delivery of the ledger."""

    def __init__(self, text: str) -> None:
        fields = json.loads(text)
        self.pid: int = fields["pid"]
        self.id: str = fields["id"]
        self.key: str | None = fields["key"]
        self.n: int = fields["n"]


def ledger(path: Path) -> list[Line]:
    if not path.exists():
        return []
    # The last line may be half of one: its writer was killed.
    return [Line(text) for text in path.read_text().split("\n")[:-1]]


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
        await relay(store, stream(MemoryPublisher())).start()
    await store.close()
    assert "\n" not in str(caught.value)
    return str(caught.value)
