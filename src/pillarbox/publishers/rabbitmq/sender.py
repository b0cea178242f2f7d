"""One connection that publishes a batch: one unconfirmed event for each key, keys side by side."""

import asyncio
import logging
import re
import struct
import time
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Final

from aiormq import Channel
from aiormq.exceptions import AMQPChannelError, AMQPError, ChannelInvalidStateError, DeliveryError, PublishError

from pillarbox.amqp import AmqpConnection, Server
from pillarbox.batch import Batch
from pillarbox.envelopes import RabbitMQMessage
from pillarbox.errors import Outage, PillarboxError
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, outage, rejected, retry
from pillarbox.publishers._link import Link
from pillarbox.publishers.keyed import Cursor, KeyedBatch
from pillarbox.publishers.rabbitmq.addresses import Addresses
from pillarbox.publishers.rabbitmq.messages import Posting, Router, post
from pillarbox.tasks import ended
from pillarbox.tls import reason_of

logger = logging.getLogger("pillarbox.publishers.rabbitmq")

WINDOW: Final = 500
TICK_SECONDS: Final = 0.5
QUIET_SECONDS: Final = 5.0
# Most messages in flight at a close are confirmed within this time, and then need no copy.
GRACE_SECONDS: Final = 1.0
BLOCKED: Final = "it takes no messages: its memory or its disk is full, as its own log says"

# The client passes on only the text of what closed a channel.
_EXCHANGE: Final = re.compile(r"exchange '([^']*)'")
_ROUTING_KEY: Final = re.compile(r"access to topic '(.*)' in exchange '[^']*'", re.DOTALL)
_TOO_LARGE: Final = re.compile(r"message size \d+ .* max size (\d+)")
_DEFAULT_EXCHANGE: Final = "amq.default"  # its name in what the server says
_LOST: Final = (AMQPError, ChannelInvalidStateError, ConnectionError)


class Ending(Enum):
    """The end of the wait for a call's confirmations."""

    ANSWERED = auto()
    STOPPED = auto()
    LOST = auto()  # the server closed the channel or the connection
    STUCK = auto()  # silent for a part of the events
    SILENT = auto()


class Sender:
    """One connection, used by one call at a time. It is thrown away when the answer to a message is not known, because
    nothing else takes back what the server has not read."""

    def __init__(
        self,
        server: Server,
        router: Router,
        addresses: Addresses,
        message_of: Callable[[Event], RabbitMQMessage],
        waiting: Link,
        *,
        connect_seconds: float,
        stuck_seconds: float,
    ) -> None:
        self._server = server
        self.router = router
        self.addresses = addresses
        self.message_of = message_of
        self.waiting = waiting
        self.connect_seconds = connect_seconds
        self.stuck_seconds = stuck_seconds
        self.stop = asyncio.Event()
        self._link: AmqpConnection | None = None
        self._channel: Channel | None = None

    async def _connect(self) -> tuple[AmqpConnection, Channel]:
        """The open connection. Raises Outage when there can be none."""
        if self._link is None or self._channel is None or not self._link.is_open or self._channel.is_closed:
            await self.drop()
            self._link = await AmqpConnection.connect(self._server, self.connect_seconds)
            try:
                async with asyncio.timeout(self.connect_seconds):
                    self._channel = await self._link.channel(confirms=True)
            except (TimeoutError, *_LOST) as error:
                await self.drop()
                raise Outage(f"{self._server.description} cannot be reached: {reason_of(error)}") from error
        return self._link, self._channel

    async def prepare(self, topics: Collection[str]) -> tuple[AmqpConnection, Channel]:
        """Connect, and ask about these addresses. Raises Outage when the server does not answer."""
        link, channel = await self._connect()
        try:
            async with asyncio.timeout(self.connect_seconds):
                await self.addresses.look_up(link, topics)
        except (TimeoutError, *_LOST) as error:
            await self.drop()
            raise Outage(f"{self._server.description} cannot be reached: {reason_of(error)}") from error
        return link, channel

    async def deliver(self, batch: Batch) -> list[Outcome]:
        """One outcome per event. Returns soon after ``stop`` is set."""
        begun, stopping = asyncio.create_task(self._begin(batch)), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((begun, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(stopping)
            if not begun.done():
                await ended(begun)
                await self.drop()
        if begun.cancelled():
            return [UNTRIED] * len(batch)
        call = begun.result()
        if isinstance(call, Outcome):
            return [call] * len(batch)
        try:
            return await call.run()
        finally:
            if call.unanswered or call.channel.is_closed:
                await self.drop()

    async def _begin(self, batch: Batch) -> "_Call | Outcome":
        try:
            link, channel = await self.prepare({event.topic for event in batch})
        except Outage as error:
            return outage(str(error))
        return _Call(self, link, channel, batch)

    async def drop(self) -> None:
        link, self._link, self._channel = self._link, None, None
        if link is not None:
            await link.abort()

    async def close(self) -> None:
        link, self._link, self._channel = self._link, None, None
        if link is not None:
            await link.close()


class _Call:
    """One call of ``publish``."""

    def __init__(self, sender: Sender, link: AmqpConnection, channel: Channel, batch: Batch) -> None:
        self._sender = sender
        self._link = link
        self.channel = channel
        self._keyed = KeyedBatch(batch)
        self._confirmed = 0
        self._answers = 0
        self._lost_by = "the connection was lost"
        self._is_refused = self._is_explained = False
        # The events that were sent and have no answer yet.
        self.unanswered: dict[Cursor, tuple[Event, Posting]] = {}

    async def run(self) -> list[Outcome]:
        work = asyncio.create_task(self._keyed.work(self._work, concurrency=WINDOW))
        closing = self.channel.closing
        stopping = asyncio.create_task(self._sender.stop.wait())
        try:
            ending = await self._watch(work, closing, stopping)
        finally:
            await ended(work)
            await ended(stopping)
            closing.cancel()
        if self._confirmed:
            self._sender.waiting.confirmed()
        if ending is Ending.LOST:
            self._learn(closing)
        for cursor, (event, posting) in self.unanswered.items():
            cursor.record(self._outcome(ending, event, posting))
        return self._keyed.outcomes

    async def _work(self, cursor: Cursor) -> None:
        while (event := cursor.event) is not None and not self._sender.stop.is_set():
            outcome = self._sender.addresses.problem(event.topic)
            posting = None if outcome is not None else self._posting(event)
            if isinstance(posting, Posting):
                outcome = self._sender.addresses.key_problem(event.topic, posting.address.routing_key)
            if isinstance(posting, Outcome):
                outcome = posting
            elif posting is not None and outcome is None:
                self.unanswered[cursor] = event, posting
                try:
                    outcome = await self._send(event, posting)
                except (*_LOST, asyncio.CancelledError):
                    # The client also ends what waits on a lost connection with CancelledError. ``run`` finds out what
                    # this means for the event.
                    return
                del self.unanswered[cursor]
            assert outcome is not None
            cursor.record(outcome)

    def _posting(self, event: Event) -> Posting | Outcome:
        sender = self._sender
        try:
            address = sender.router.address(event)
            return post(event, address, sender.message_of, sender.addresses.max_bytes, self._link.frame_bytes)
        except PillarboxError as error:
            return rejected(str(error))
        except Exception as error:
            logger.debug("the envelope failed on event %s", event.id, exc_info=error)
            # Only the kind: the text might quote the payload.
            return rejected(f"the envelope or header builder failed with {type(error).__name__}; correct it")

    async def _send(self, event: Event, posting: Posting) -> Outcome:
        (exchange, routing_key), body, properties = posting
        addresses = self._sender.addresses
        try:
            await self.channel.basic_publish(
                body, exchange=exchange, routing_key=routing_key, properties=properties, mandatory=True, wait=False
            )
        except PublishError:
            self._answers += 1
            return addresses.unroutable(event.topic, routing_key)
        except DeliveryError:
            self._answers += 1
            # Another queue may have it, and this one when it has room again.
            return retry(
                f"{self._link.description} refused the event for routing key {routing_key!r}: a queue is full or its "
                "leader is away",
                charged=False,
                ambiguous=True,
            )
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            logger.debug("the client cannot write event %s", event.id, exc_info=error)
            return rejected(f"RabbitMQ's protocol has no form for a header or a field ({type(error).__name__})")
        self._answers += 1
        self._confirmed += 1
        addresses.accepted(event.topic, routing_key)
        return PUBLISHED

    async def _watch(
        self, work: "asyncio.Task[list[Outcome]]", closing: "asyncio.Future[None]", stopping: "asyncio.Task[bool]"
    ) -> Ending:
        """Wait for the end of the call. While the server is silent, find out why."""
        waiting, stuck_seconds = self._sender.waiting, self._sender.stuck_seconds
        quiet_since, answers = time.monotonic(), -1
        while True:
            await asyncio.wait((work, closing, stopping), timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not self.unanswered:
                return Ending.ANSWERED
            if closing.done() or work.done():
                return Ending.LOST
            if stopping.done():
                await asyncio.wait((work, closing), timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                return Ending.STOPPED if self.unanswered else Ending.ANSWERED
            now = time.monotonic()
            if self._answers > answers:
                quiet_since, answers = now, self._answers
                continue
            quiet_seconds = now - quiet_since
            if quiet_seconds < min(QUIET_SECONDS, stuck_seconds):
                continue
            if await self._link.is_blocked():
                waiting.silent(quiet_seconds, BLOCKED)
                continue
            waiting.silent(quiet_seconds, None)
            if quiet_seconds >= stuck_seconds:
                answers_now = await self._link.answers(self._sender.connect_seconds)
                return Ending.STUCK if answers_now and self._confirmed else Ending.SILENT

    def _learn(self, closing: "asyncio.Future[None]") -> None:
        """Keep what the server said when it closed the channel."""
        error = closing.exception() if closing.done() and not closing.cancelled() else None
        if error is not None:
            self._lost_by = reason_of(error)
        # The connection may be closed too by now, because of what was sent behind the refused message.
        self._is_refused = isinstance(error, AMQPChannelError)
        if not self._is_refused:
            return
        if too_large := _TOO_LARGE.search(self._lost_by):
            self._sender.addresses.learn_max_bytes(int(too_large[1]))
            self._is_explained = True
        elif exchange := _EXCHANGE.search(self._lost_by):
            self._is_explained = self._learn_address(exchange[1], _ROUTING_KEY.search(self._lost_by))

    def _learn_address(self, exchange: str, routing_key: re.Match[str] | None) -> bool:
        """Keep that an exchange, or one of its routing keys, was refused. Whether an event on its way has it."""
        for event, posting in self.unanswered.values():
            if (posting.address.exchange or _DEFAULT_EXCHANGE) != exchange:
                continue
            if routing_key is None:
                self._sender.addresses.refused(event.topic, self._lost_by)
                return True
            if posting.address.routing_key == routing_key[1]:
                self._sender.addresses.refused_key(event.topic, routing_key[1], self._lost_by)
                return True
        return False

    def _outcome(self, ending: Ending, event: Event, posting: Posting) -> Outcome:
        name, addresses = self._link.description, self._sender.addresses
        if ending is Ending.STOPPED:
            return UNTRIED
        if ending is Ending.STUCK:
            return retry(
                f"{name} confirmed nothing for {self._sender.stuck_seconds:g} s on this event's queue, though it did "
                "on others; tried again later",
                charged=False,
            )
        if ending is Ending.SILENT:
            return outage(f"{name} confirmed nothing for {self._sender.stuck_seconds:g} s")
        if len(posting.body) > addresses.max_bytes:
            refused = self._posting(event)
            assert isinstance(refused, Outcome)
            return refused
        if (problem := addresses.problem(event.topic)) is not None:
            return problem
        if (problem := addresses.key_problem(event.topic, posting.address.routing_key)) is not None:
            return problem
        if self._is_refused and self._is_explained:
            return UNTRIED  # because of another event
        if self._is_refused:
            # One of them is refused, and it is not known which.
            return retry(f"{name} closed the channel: {self._lost_by}", charged=False, ambiguous=True)
        return outage(f"{name} closed the connection: {self._lost_by}")
