"""Tests of the contract: a source with a planted bug must fail it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pillarbox.conformance.source import SourceContract
from pillarbox.source import Lane, Lanes, Message, Source
from pillarbox.sources.memory import MemorySource, MemoryTopic


class SettlesWhatItHandsOut(MemorySource):
    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        found = await super().receive(limit, seconds)
        for message in found:
            self.settle(message.lane, message.position)
        return found


class ForgetsWhatIsSettled(MemorySource):
    def settle(self, lane: Lane, position: int) -> None:
        return


class SettlesOneTooMany(MemorySource):
    def settle(self, lane: Lane, position: int) -> None:
        super().settle(lane, position + 1)


class SettlesOneTooFew(MemorySource):
    def settle(self, lane: Lane, position: int) -> None:
        super().settle(lane, position - 1)


class Reorders(MemorySource):
    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        return list(await super().receive(limit, seconds))[::-1]


class IgnoresTheLimit(MemorySource):
    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        return await super().receive(limit + 1000, seconds)


class NeverPauses(MemorySource):
    def pause(self, lane: Lane) -> None:
        return


class NeverResumes(MemorySource):
    def resume(self, lane: Lane) -> None:
        return


class LosesWhatComesDuringAPause(MemorySource):
    paused = False

    def pause(self, lane: Lane) -> None:
        self.paused = True

    def resume(self, lane: Lane) -> None:
        self.paused = False

    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        found = await super().receive(limit, seconds)
        return [] if self.paused else found


class Changes(MemorySource):
    """Changes each message."""

    def changed(self, message: Message) -> Message:
        raise NotImplementedError

    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        return [self.changed(message) for message in await super().receive(limit, seconds)]


class CutsTheBody(Changes):
    def changed(self, message: Message) -> Message:
        return message._replace(body=message.body[:65536])


class StripsTheBody(Changes):
    def changed(self, message: Message) -> Message:
        return message._replace(body=message.body.strip())


class DropsHeaders(Changes):
    def changed(self, message: Message) -> Message:
        return message._replace(headers=message.headers[:1])


class InventsAKey(Changes):
    def changed(self, message: Message) -> Message:
        return message._replace(key=message.key or b"")


class HasANewPlaceEachTime(Changes):
    number = 0

    def changed(self, message: Message) -> Message:
        HasANewPlaceEachTime.number += 1
        return message._replace(place=str(self.number))


class WaitsForAMessage(MemorySource):
    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        return await super().receive(limit, 3600)


class KnowsNoLag(MemorySource):
    async def lag(self) -> Mapping[Lane, int]:
        return dict.fromkeys(await super().lag(), 0)


class SharesOnePlaceWithAll(MemorySource):
    async def open(self, consumer: str, lanes: Lanes) -> None:
        await super().open("everybody", lanes)


class TellsOfNoRevocation(MemorySource):
    """It takes lanes away without a word to their consumer."""

    async def open(self, consumer: str, lanes: Lanes) -> None:
        class Silent:
            assigned, lost, failed = lanes.assigned, lanes.lost, lanes.failed

            async def revoked(self, gone: Sequence[Lane]) -> None:
                lanes.lost(gone)

        await super().open(consumer, Silent())


class DoesNotWaitForItsConsumer(MemorySource):
    """It gives lanes away while their consumer still finishes."""

    tasks: set[Any]

    async def open(self, consumer: str, lanes: Lanes) -> None:
        tasks = self.tasks = set()

        class Hasty:
            assigned, lost, failed = lanes.assigned, lanes.lost, lanes.failed

            async def revoked(self, gone: Sequence[Lane]) -> None:
                tasks.add(asyncio.create_task(lanes.revoked(gone)))

        await super().open(consumer, Hasty())


class ReusesItsLane(MemorySource):
    """The lane of the second time is that of the first."""

    kept: tuple[Lane, ...] = ()

    async def open(self, consumer: str, lanes: Lanes) -> None:
        await super().open(consumer, lanes)

    def settle(self, lane: Lane, position: int) -> None:
        session = self._opened()
        part = session.part_of.get(lane)
        if part is None:  # the lane of an earlier open
            part = int(lane.name.rpartition("/")[2])
            session.group.settled[part] = max(session.group.settled[part], position + 1)
            return
        super().settle(lane, position)


class StaysInTheGroup(MemorySource):
    async def close(self) -> None:
        self._session = None


class GivesUpInAnOutage(MemorySource):
    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        if self.topic._down is not None:
            self.die(RuntimeError("the broker is away"))
        return await super().receive(limit, seconds)


MUTANTS = [
    each
    for each in list(globals().values())
    if isinstance(each, type) and issubclass(each, MemorySource) and each not in (MemorySource, Changes)
]
TESTS = [name for name in dir(SourceContract) if name.startswith("test_")]


def contract(kind: type[MemorySource]) -> SourceContract:
    class Contract(SourceContract):
        can_share = True
        can_go_down = True
        limit_seconds = 1.0
        quiet_seconds = 0.02

        def __init__(self) -> None:
            self.memory = MemoryTopic(4)

        def make(self) -> Source:
            return kind(self.memory)

        async def send(self, body: bytes, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
            pairs = [(name, value.encode()) for name, value in (headers or {}).items()]
            self.memory.put(body, key=None if key is None else key.encode(), headers=pairs)

        async def go_down(self) -> None:
            self.memory.down()

        async def come_back(self) -> None:
            self.memory.up()

    return Contract()


async def passes(kind: type[MemorySource], test: str) -> bool:
    try:
        async with asyncio.timeout(5):
            await getattr(contract(kind), test)()
    except (Exception, pytest.fail.Exception):
        return False
    return True


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", MUTANTS, ids=lambda kind: kind.__name__)
async def test_a_planted_bug_is_found(kind: type[MemorySource]) -> None:
    for test in TESTS:
        if not await passes(kind, test):
            return
    pytest.fail(f"no test of the contract found that {kind.__name__}")


@pytest.mark.asyncio
async def test_a_healthy_source_passes() -> None:
    """Else the planted bugs would prove nothing."""
    assert [test for test in TESTS if not await passes(MemorySource, test)] == []
