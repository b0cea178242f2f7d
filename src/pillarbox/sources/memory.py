"""A broker in memory, for tests: it keeps messages and places, and takes lanes away on request."""

import asyncio
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pillarbox.durations import Duration, seconds_of
from pillarbox.envelopes import Envelope, kafka
from pillarbox.errors import ConfigError, Outage
from pillarbox.event import Event
from pillarbox.source import Lane, Lanes, Message, Order, SourceFeatures


class MemoryTopic:
    """The messages, in lanes, and how far the consumers of each name have settled them.

    Several sources of one topic share its lanes among the consumers of one name, as processes share the partitions of
    Kafka. All calls belong into one event loop. lanes: how many. name: for places and logs.
    """

    def __init__(self, lanes: int = 1, *, name: str = "memory") -> None:
        if lanes < 1:
            raise ConfigError(f"lanes={lanes}: give 1 or more")
        self.name = name
        self._parts: list[list[Message]] = [[] for _ in range(lanes)]
        self._groups: dict[str, _Group] = {}
        self._changes = _Changes()
        self._down: str | None = None

    def send(self, event: Event, *, envelope: Envelope | None = None, lane: int | None = None) -> str:
        """Append an event in the form in which a publisher for Kafka writes it. Returns its place."""
        key, body, headers = kafka(envelope or Envelope())(event)
        return self.put(body or b"", key=key, headers=headers, lane=lane)

    def put(
        self,
        body: bytes,
        *,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        lane: int | None = None,
    ) -> str:
        """Append a message. Returns its place. lane: its number; default: by the key, else one after the other."""
        if lane is None:
            total = sum(map(len, self._parts))
            lane = (total if key is None else zlib.crc32(key)) % len(self._parts)
        part = self._parts[lane]
        place = f"{self.name}/{lane}/{len(part)}"
        part.append(
            Message(
                _NOWHERE, len(part), self.name, key, body, tuple(headers), written_at=datetime.now(UTC), place=place
            )
        )
        self._changes.tell()
        return place

    def settled(self, consumer: str) -> list[int]:
        """The number of settled messages of each lane."""
        return list(self._group(consumer).settled)

    def paused(self, consumer: str) -> list[bool]:
        """Whether the consumer of each lane has paused it."""
        owners = self._group(consumer).owners
        return [
            part in owners and part in owners[part].reading and owners[part].reading[part].is_paused
            for part in range(len(self._parts))
        ]

    async def wait_settled(self, consumer: str, *, timeout: Duration = "10s") -> None:
        """Return when the consumers of this name have settled every message; TimeoutError after ``timeout``."""
        await self._changes.wait_for(
            lambda: self.settled(consumer) == [len(part) for part in self._parts],
            seconds_of("timeout", timeout),
            lambda: f"of {[len(part) for part in self._parts]} messages {self.settled(consumer)} are settled",
        )

    def down(self, error: str = "down() was called on the memory topic") -> None:
        """Be away, until ``up``."""
        self._down = error
        self._changes.tell()

    def up(self) -> None:
        self._down = None
        self._changes.tell()

    async def revoke(self, consumer: str, lane: int) -> None:
        """Take a lane away, as a rebalance does: its consumer finishes first. Then give it out again."""
        group = self._group(consumer)
        async with group.lock:
            await group.take(lane)
            group.give()

    async def lose(self, consumer: str, lane: int) -> None:
        """Take a lane away as if its consumer were silent for too long, and give it out again."""
        group = self._group(consumer)
        async with group.lock:
            owner = group.owners.pop(lane, None)
            if owner is not None:
                owner.lose(lane)
            group.give()

    def fail(self, consumer: str, lane: int, error: str) -> None:
        """Bring no message of this lane any more, as when its data are gone."""
        owner = self._group(consumer).owners.get(lane)
        if owner is not None:
            owner.fail(lane, error)

    def _group(self, consumer: str) -> "_Group":
        return self._groups.setdefault(consumer, _Group(len(self._parts)))


_NOWHERE = Lane("")


class _Changes:
    """Wakes everyone who waits. Unlike asyncio's own conditions it belongs to no event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, is_so: Callable[[], bool], seconds: float, problem: Callable[[], str]) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not is_so():
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiting.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiting.discard(waiter)
        except TimeoutError:
            raise TimeoutError(f"after {seconds:g} s {problem()}") from None


class _Group:
    """The consumers of one name."""

    def __init__(self, parts: int) -> None:
        self.settled = [0] * parts
        self.members: list[_Session] = []
        self.owners: dict[int, _Session] = {}
        self.lock = asyncio.Lock()

    async def join(self, member: "_Session") -> None:
        async with self.lock:
            self.members.append(member)
            for part, owner in list(self.owners.items()):
                if owner is not self._wanted(part):
                    await self.take(part)
            self.give()

    async def leave(self, member: "_Session") -> None:
        async with self.lock:
            self.members.remove(member)
            self.owners = {part: owner for part, owner in self.owners.items() if owner is not member}
            self.give()

    async def take(self, part: int) -> None:
        if (owner := self.owners.get(part)) is not None:
            await owner.revoke(part)
            self.owners.pop(part, None)

    def give(self) -> None:
        for part in range(len(self.settled)):
            if part not in self.owners and self.members:
                self.owners[part] = self._wanted(part)
                self.owners[part].assign(part, self.settled[part])

    def _wanted(self, part: int) -> "_Session":
        return self.members[part % len(self.members)]


@dataclass(slots=True)
class _Reading:
    lane: Lane
    next: int
    is_paused: bool = False
    is_failed: bool = False


@dataclass(eq=False)
class _Session:
    """The state of a source from ``open`` to ``close``."""

    topic: MemoryTopic
    group: _Group
    lanes: Lanes
    reading: dict[int, _Reading] = field(default_factory=dict)
    part_of: dict[Lane, int] = field(default_factory=dict)
    error: Exception | None = None

    def assign(self, part: int, position: int) -> None:
        lane = Lane(f"{self.topic.name}/{part}")
        self.reading[part], self.part_of[lane] = _Reading(lane, position), part
        self.lanes.assigned([lane])
        self.topic._changes.tell()

    async def revoke(self, part: int) -> None:
        reading = self.reading.pop(part)
        await self.lanes.revoked([reading.lane])
        del self.part_of[reading.lane]

    def lose(self, part: int) -> None:
        reading = self.reading.pop(part)
        del self.part_of[reading.lane]
        self.lanes.lost([reading.lane])

    def fail(self, part: int, error: str) -> None:
        self.reading[part].is_failed = True
        self.lanes.failed(self.reading[part].lane, error)

    def take(self, limit: int) -> list[Message]:
        taken: list[Message] = []
        for part, reading in self.reading.items():
            if not (reading.is_paused or reading.is_failed):
                found = self.topic._parts[part][reading.next : reading.next + limit - len(taken)]
                reading.next += len(found)
                taken += [message._replace(lane=reading.lane) for message in found]
        return taken


class MemorySource:
    """Reads a topic in memory: by default one of its own."""

    options: frozenset[str] = frozenset()

    def __init__(self, topic: MemoryTopic | None = None) -> None:
        self.topic = topic or MemoryTopic()
        self._session: _Session | None = None

    @property
    def features(self) -> SourceFeatures:
        return SourceFeatures(Order.LANE)

    @property
    def description(self) -> str:
        return f"memory {self.topic.name}"

    def die(self, error: Exception) -> None:
        """Make ``receive`` raise this error from now on, until the source is opened again."""
        if self._session is not None:
            self._session.error = error
            self.topic._changes.tell()

    async def open(self, consumer: str, lanes: Lanes) -> None:
        self._check()
        if self._session is None:
            group = self.topic._group(consumer)
            self._session = _Session(self.topic, group, lanes)
            await group.join(self._session)

    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        session = self._opened()
        found: list[Message] = []

        def has_some() -> bool:
            self._check()
            if session.error is not None:
                raise session.error
            found.extend(session.take(limit))
            return bool(found)

        with suppress(TimeoutError):
            await self.topic._changes.wait_for(has_some, seconds, lambda: "no message came")
        return found

    def settle(self, lane: Lane, position: int) -> None:
        session = self._opened()
        if (part := session.part_of.get(lane)) is not None:
            settled = session.group.settled
            settled[part] = max(settled[part], position + 1)
            self.topic._changes.tell()

    def pause(self, lane: Lane) -> None:
        if (reading := self._reading(lane)) is not None:
            reading.is_paused = True

    def resume(self, lane: Lane) -> None:
        if (reading := self._reading(lane)) is not None:
            reading.is_paused = False
            self.topic._changes.tell()

    async def lag(self) -> Mapping[Lane, int]:
        session = self._opened()
        if self.topic._down is not None:
            return {}
        settled = session.group.settled
        return {reading.lane: len(self.topic._parts[part]) - settled[part] for part, reading in session.reading.items()}

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.group.leave(session)

    def _opened(self) -> _Session:
        if self._session is None:
            raise ConfigError("the memory source is not open; call open() first")
        return self._session

    def _reading(self, lane: Lane) -> _Reading | None:
        session = self._opened()
        part = session.part_of.get(lane)
        return None if part is None else session.reading.get(part)

    def _check(self) -> None:
        if self.topic._down is not None:
            raise Outage(self.topic._down)
