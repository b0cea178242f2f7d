"""The tests that every source must pass; subclass them for a broker of your own."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import ClassVar, Final

import pytest

from pillarbox.conformance.events import unique_key
from pillarbox.errors import Outage
from pillarbox.source import Lane, Message, Source, SourceFeatures

BODIES: Final = (
    b'{"order_id":7}',
    b'{ "spaced" :  1.0, "b": 1e2, "a": [ ] , "b": 2 }',
    '{"name":"Zoë Łódź 東京 \U0001f4ee\u2028"}'.encode(),
    b'\r\n {"lines": 2} \n',
    b"",
    b"\x00\xff\xfe\r\n\x80 not text",
    b'"' + b"x" * 200_000 + b'"',
)
_POLL_SECONDS: Final = 0.1


class Reader:
    """A consumer that only reads: it opens a source, keeps what it is told of lanes, and collects messages."""

    def __init__(self, source: Source, limit_seconds: float) -> None:
        self.source = source
        self.lanes: list[Lane] = []
        self.gone: list[Lane] = []
        self.messages: list[Message] = []
        self.on_revoke: Callable[[Sequence[Lane]], Awaitable[None]] | None = None
        self._limit_seconds = limit_seconds

    def assigned(self, lanes: Sequence[Lane]) -> None:
        assert not set(lanes) & {*self.lanes, *self.gone}, "a lane that comes back must be another object"
        self.lanes += lanes

    async def revoked(self, lanes: Sequence[Lane]) -> None:
        assert set(lanes) <= set(self.lanes), "a lane was revoked that was not assigned"
        if self.on_revoke is not None:
            await self.on_revoke(lanes)
        self.lost(lanes)

    def lost(self, lanes: Sequence[Lane]) -> None:
        self.lanes = [lane for lane in self.lanes if lane not in lanes]
        self.gone += lanes

    def failed(self, lane: Lane, error: str) -> None:
        raise AssertionError(f"{lane.name} failed: {error}")

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    async def read(self, count: int, *, limit: int = 500) -> list[Message]:
        """Receive until ``count`` messages have come, and return them."""
        begin = len(self.messages)
        await self.read_until(lambda: len(self.messages) - begin >= count, f"{count} messages", limit=limit)
        return self.messages[begin:]

    async def read_until(self, is_so: Callable[[], bool], wanted: str, *, limit: int = 500) -> None:
        try:
            async with asyncio.timeout(self._limit_seconds):
                while not is_so():
                    await self.receive(limit)
        except TimeoutError:
            pytest.fail(f"{wanted} did not come within {self._limit_seconds:g} s; {len(self.messages)} messages came")

    async def receive(self, limit: int = 500, seconds: float = _POLL_SECONDS) -> Sequence[Message]:
        """Receive once. A broker that is away brings nothing."""
        try:
            found = await self.source.receive(limit, seconds)
        except Outage:
            await asyncio.sleep(_POLL_SECONDS)  # the next call would raise at once too
            return []
        assert len(found) <= limit, "more messages than the limit"
        self.messages += found
        return found

    def settle(self, messages: Iterable[Message]) -> None:
        """Settle these and all before them."""
        last: dict[Lane, int] = {}
        for message in messages:
            last[message.lane] = max(message.position, last.get(message.lane, message.position))
        for lane, position in last.items():
            self.source.settle(lane, position)


class SourceContract:
    """Subclass it in a test module: write ``make`` and ``send``, and a fixture that gives each test messages of its
    own.

    Declare what the test environment can do: ``can_share`` if two sources of one consumer share lanes,
    ``can_go_down`` with ``go_down`` and ``come_back``. ``keeps_keys``: the broker has a key for each message.
    ``limit_seconds``: the longest wait for messages that must come. ``quiet_seconds``: so long nothing must come.
    """

    can_share: ClassVar[bool] = False
    can_go_down: ClassVar[bool] = False
    keeps_keys: ClassVar[bool] = True
    limit_seconds: ClassVar[float] = 30.0
    quiet_seconds: ClassVar[float] = 0.5

    def make(self) -> Source:
        """A new source, not yet open, of this test's messages: from the first one on for a new consumer."""
        raise NotImplementedError("make a source")

    async def send(self, body: bytes, *, key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        """Write one message, behind those that were sent before."""
        raise NotImplementedError("write a message to the broker")

    async def go_down(self) -> None:
        """Make the broker unreachable."""
        raise NotImplementedError("cut the broker off, or set can_go_down = False")

    async def come_back(self) -> None:
        raise NotImplementedError("bring the broker back, or set can_go_down = False")

    @pytest.mark.asyncio
    async def test_source_describes_itself(self) -> None:
        source = self.make()
        assert isinstance(source.features, SourceFeatures)
        assert source.description.strip()

    @pytest.mark.asyncio
    async def test_messages_keep_their_bytes(self) -> None:
        for body in BODIES:
            await self.send(body, key="k")
        reader = await self._opened()
        await reader.read(len(BODIES))
        assert reader.bodies == list(BODIES)
        await reader.source.close()

    @pytest.mark.asyncio
    async def test_messages_keep_their_keys_and_headers(self) -> None:
        began = datetime.now(UTC)
        await self.send(b"1", key="Łódź", headers={"event_type": "card.made", "who": "Zoë"})
        await self.send(b"2")
        reader = await self._opened()
        first, second = sorted(await reader.read(2), key=lambda message: message.body)
        headers = dict(first.headers)
        assert headers["event_type"] == b"card.made"
        assert headers["who"] == "Zoë".encode()
        if self.keeps_keys:
            assert first.key == "Łódź".encode()
        assert second.key is None
        for message in (first, second):
            if message.written_at is not None:
                assert abs(message.written_at - began) < timedelta(minutes=5)
        await reader.source.close()

    @pytest.mark.asyncio
    async def test_a_key_keeps_its_order(self) -> None:
        keys = [unique_key() for _ in range(5)]
        sent = [(key, b"%d" % number) for number in range(20) for key in keys]
        for key, body in sent:
            await self.send(key.encode() + b" " + body, key=key)
        reader = await self._opened()
        await reader.read(len(sent), limit=7)
        for key in keys:
            own = [body for body in reader.bodies if body.startswith(key.encode())]
            assert own == [key.encode() + b" %d" % number for number in range(20)], "a key came in another order"
        self._assert_positions_grow(reader)
        await reader.source.close()

    @pytest.mark.asyncio
    async def test_receive_returns_without_messages(self) -> None:
        reader = await self._opened()
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout(self.limit_seconds):
            assert not await reader.receive(seconds=0.05)
        assert asyncio.get_running_loop().time() - begun < self.limit_seconds
        await self.send(b"late")
        assert [message.body for message in await reader.read(1)] == [b"late"]
        await reader.source.close()

    @pytest.mark.asyncio
    async def test_what_is_not_settled_comes_again(self) -> None:
        for number in range(10):
            await self.send(b"%d" % number, key="k")
        first = await self._opened()
        before = await first.read(10)
        await first.source.close()
        second = await self._opened()
        again = await second.read(10)
        assert [message.body for message in again] == [b"%d" % number for number in range(10)]
        if before[0].place:
            assert [message.place for message in again] == [message.place for message in before]
            assert len({message.place for message in again}) == 10, "two messages have one place"
        await second.source.close()

    @pytest.mark.asyncio
    async def test_what_is_settled_does_not_come_again(self) -> None:
        for number in range(10):
            await self.send(b"%d" % number, key="k")
        first = await self._opened()
        messages = await first.read(10)
        first.settle(messages[:4])
        await first.source.close()
        second = await self._opened()
        assert [message.body for message in await second.read(6)] == [b"%d" % number for number in range(4, 10)]
        second.settle(second.messages)
        await second.source.close()
        await self.send(b"new", key="k")
        third = await self._opened()
        assert [message.body for message in await third.read(1)] == [b"new"]
        await third.source.close()

    @pytest.mark.asyncio
    async def test_a_source_opens_again(self) -> None:
        await self.send(b"1", key="k")
        await self.send(b"2", key="k")
        reader = await self._opened()
        messages = await reader.read(2)
        reader.settle(messages[:1])
        await reader.source.close()
        await reader.source.close()
        again = Reader(reader.source, self.limit_seconds)
        await again.source.open("cards", again)
        # The lane of the first time is gone: settling it changes nothing.
        again.source.settle(messages[1].lane, messages[1].position)
        assert [message.body for message in await again.read(1)] == [b"2"]
        await again.source.close()
        third = await self._opened()
        assert [message.body for message in await third.read(1)] == [b"2"]
        await third.source.close()

    @pytest.mark.asyncio
    async def test_consumers_of_another_name_have_places_of_their_own(self) -> None:
        await self.send(b"1", key="k")
        first = await self._opened()
        first.settle(await first.read(1))
        await first.source.close()
        other = await self._opened("mailer")
        assert [message.body for message in await other.read(1)] == [b"1"]
        await other.source.close()

    @pytest.mark.asyncio
    async def test_a_paused_lane_brings_nothing_and_loses_nothing(self) -> None:
        await self.send(b"0", key="k")
        reader = await self._opened()
        (first,) = await reader.read(1)
        reader.source.pause(first.lane)
        reader.source.pause(first.lane)
        for number in range(1, 30):
            await self.send(b"%d" % number, key="k")
        # Those that were on their way may still come.
        until = asyncio.get_running_loop().time() + self.quiet_seconds
        while asyncio.get_running_loop().time() < until:
            await reader.receive()
        await self.send(b"30", key="k")
        paused_at = len(reader.messages)
        assert not await reader.receive(seconds=self.quiet_seconds), "a paused lane brought messages"
        reader.source.resume(first.lane)
        await reader.read(31 - paused_at)
        assert reader.bodies == [b"%d" % number for number in range(31)]
        assert {message.lane for message in reader.messages} == {first.lane}, "a pause is no new lane"
        await reader.source.close()

    @pytest.mark.asyncio
    async def test_lag_counts_what_is_not_settled(self) -> None:
        if not self.make().features.lag:
            pytest.skip("the source does not declare lag")
        for number in range(5):
            await self.send(b"%d" % number, key="k")
        reader = await self._opened()
        messages = await reader.read(5)
        assert await self._lag_becomes(reader, 5)
        reader.settle(messages[:3])
        assert await self._lag_becomes(reader, 2)
        await reader.source.close()

    @pytest.mark.asyncio
    async def test_two_sources_share_the_messages(self) -> None:
        self._needs_sharing()
        keys = [unique_key() for _ in range(40)]
        for key in keys:
            await self.send(key.encode() + b" 1", key=key)
        first = await self._opened()
        settled: list[bytes] = []
        done = await first.read(40)

        async def settle_half(lanes: Sequence[Lane]) -> None:
            own = [message for message in done if message.lane in lanes]
            first.settle(own)
            settled.extend(message.body for message in own)
            # The lanes are still ours: nobody else has their messages until this returns.
            await asyncio.sleep(self.quiet_seconds)
            assert not set(second.bodies) & set(settled), "a lane was given away before its consumer had finished"

        first.on_revoke = settle_half
        second = Reader(self.make(), self.limit_seconds)
        opening = asyncio.create_task(second.source.open("cards", second))

        async def both() -> None:
            await first.receive()
            if opening.done():
                await second.receive()

        await self._until(both, lambda: opening.done() and bool(second.lanes) and bool(first.gone or settled))
        await opening
        assert settled or not first.gone, "lanes of a healthy source were lost and not revoked"
        for key in keys:
            await self.send(key.encode() + b" 2", key=key)
        await self._until(both, lambda: sum(b.endswith(b" 2") for b in {*first.bodies, *second.bodies}) == 40)
        assert not set(second.bodies) & set(settled), "what was settled in a revocation came again"
        new = [body for reader in (first, second) for body in reader.bodies if body.endswith(b" 2")]
        assert sorted(new) == sorted(key.encode() + b" 2" for key in keys), "a message came to both, or twice"
        assert any(body.endswith(b" 2") for body in second.bodies), "the second source got no lane"
        await asyncio.gather(first.source.close(), second.source.close())

    @pytest.mark.asyncio
    async def test_a_closed_source_leaves_its_messages_to_others(self) -> None:
        self._needs_sharing()
        first = await self._opened()
        await self.send(b"1", key="k")
        first.settle(await first.read(1))
        second = Reader(self.make(), self.limit_seconds)
        await second.source.open("cards", second)
        await first.source.close()
        for number in range(10):
            await self.send(b"2 %d" % number, key=unique_key())
        await second.read_until(lambda: len(set(second.bodies)) >= 10, "10 messages")
        assert b"1" not in second.bodies
        await second.source.close()

    @pytest.mark.asyncio
    async def test_an_outage_loses_nothing(self) -> None:
        if not self.can_go_down:
            pytest.skip("can_go_down is not declared: this broker cannot be cut off")
        await self.send(b"1", key="k")
        reader = await self._opened()
        await reader.read(1)
        await self.go_down()
        await reader.receive(seconds=self.quiet_seconds)
        await self.come_back()
        await self.send(b"2", key="k")
        await reader.read_until(lambda: b"2" in reader.bodies, "the message after the outage")
        reader.settle([message for message in reader.messages if message.lane in reader.lanes])
        await reader.source.close()

    @pytest.mark.asyncio
    async def test_a_broker_that_is_away_at_first(self) -> None:
        if not self.can_go_down:
            pytest.skip("can_go_down is not declared: this broker cannot be cut off")
        await self.send(b"1", key="k")
        await self.go_down()
        reader = Reader(self.make(), self.limit_seconds)
        try:
            await asyncio.wait_for(reader.source.open("cards", reader), self.limit_seconds)
            is_open = True
        except Outage:
            is_open = False
        await self.come_back()
        if not is_open:
            await self._open_when_back(reader)
        await reader.read_until(lambda: b"1" in reader.bodies, "the message")
        await reader.source.close()

    async def _opened(self, consumer: str = "cards") -> Reader:
        reader = Reader(self.make(), self.limit_seconds)
        await reader.source.open(consumer, reader)
        return reader

    async def _open_when_back(self, reader: Reader) -> None:
        async with asyncio.timeout(self.limit_seconds):
            while True:
                try:
                    return await reader.source.open("cards", reader)
                except Outage:
                    await asyncio.sleep(_POLL_SECONDS)

    async def _until(self, step: Callable[[], Awaitable[None]], is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(self.limit_seconds):
            while not is_so():
                await step()

    async def _lag_becomes(self, reader: Reader, count: int) -> bool:
        """A broker may learn of a settle a little later."""
        found = -1
        async with asyncio.timeout(self.limit_seconds):
            while found != count:
                found = sum((await reader.source.lag()).values())
                await reader.receive()
        return True

    def _assert_positions_grow(self, reader: Reader) -> None:
        last: dict[Lane, int] = {}
        for message in reader.messages:
            assert message.lane in reader.lanes, "a message of a lane that was not assigned"
            assert message.position > last.get(message.lane, -1), "positions must grow within a lane"
            last[message.lane] = message.position

    def _needs_sharing(self) -> None:
        if not self.can_share:
            pytest.skip("can_share is not declared: two sources of one consumer share no lanes")
