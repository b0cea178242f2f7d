"""Messages of one RabbitMQ queue, which one consumer at a time reads in order."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Self

from pillarbox.durations import Duration, seconds_of
from pillarbox.envelopes.bindings import KEY_HEADER
from pillarbox.errors import ConfigError, MissingExtra, Outage
from pillarbox.source import Lane, Lanes, Message, Order, SourceFeatures
from pillarbox.tasks import PerLoop, ended
from pillarbox.tls import TLS_OPTIONS, reason_of

try:
    from aiormq import Channel
    from aiormq.abc import DeliveredMessage
    from aiormq.exceptions import AMQPError, ChannelAccessRefused, ChannelInvalidStateError

    from pillarbox.amqp import AmqpConnection, Server, is_name, split_url
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("aiormq", "pamqp", "yarl"):
        raise
    raise MissingExtra("RabbitMQSource", "rabbitmq") from error

__all__ = ["RabbitMQSource"]

logger = logging.getLogger("pillarbox.sources.rabbitmq")

_OPTIONS: Final = ("queue", "prefetch", "ack_limit", "connect_timeout", *TLS_OPTIONS)
_LOST: Final = (AMQPError, ChannelInvalidStateError, ConnectionError, TimeoutError)
_CONSUMER: Final = "{consumer}"
_SINGLE: Final = "x-single-active-consumer"
# The longest time for the consumer to finish what runs, before its messages are given back.
_REVOKE_SECONDS: Final = 60.0
_COUNTER: Final = "x-delivery-count"  # the server's own header
_MOST_PREFETCH: Final = 65_535


class RabbitMQSource:
    """Reads one queue. Of several processes one reads, and the others wait for its end: the queue must have
    ``x-single-active-consumer``.

    A message that is not settled stays in the queue and comes again, to this process or to another one. None is ever
    rejected.

    url: ``amqp://[user:password@]host[:port][/vhost]``, or ``amqps`` with TLS.
    queue: its name; ``{consumer}`` in it stands for the consumer's name.
    prefetch: how many messages the server gives out before the first of them is settled.
    ack_limit: a message that is not settled for so long is given back before the server closes the channel; it must be
    shorter than the server's ``consumer_timeout``, which is 30 minutes.
    connect_timeout: how long to wait for a connection.
    cafile: the certificates to trust, for ``amqps``; default: the system's.
    certfile: this client's own certificate.
    keyfile: the key of that certificate.
    """

    options = frozenset(_OPTIONS)

    def __init__(
        self,
        url: str,
        *,
        queue: str = "",
        prefetch: int = 1000,
        ack_limit: Duration = "25m",
        connect_timeout: Duration = "5s",
        cafile: str = "",
        certfile: str = "",
        keyfile: str = "",
    ) -> None:
        if not queue:
            raise ConfigError("no RabbitMQ queue is given; write for instance queue=orders")
        _check_name(queue.replace(_CONSUMER, ""))
        if not 1 <= prefetch <= _MOST_PREFETCH:
            raise ConfigError(f"prefetch={prefetch}: give a number from 1 to {_MOST_PREFETCH}")
        self._server = Server.of(url, cafile=cafile, certfile=certfile, keyfile=keyfile)
        self._queue = queue
        self._prefetch = prefetch
        self._ack_seconds = seconds_of("ack_limit", ack_limit, "1s")
        self._connect_seconds = seconds_of("connect_timeout", connect_timeout, "1ms", "1h")
        self._session: _Session | None = None
        self._opened: tuple[str, Lanes] | None = None
        self._changing = PerLoop(asyncio.Lock)
        self._warned = False

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """From ``amqp://host/vhost?queue=orders``; overrides are arguments too."""
        server, given = split_url(url, _OPTIONS)
        arguments: dict[str, Any] = dict(given)
        if "prefetch" in given:
            if not given["prefetch"].isdecimal():
                raise ConfigError(f"prefetch={given['prefetch']!r} in the RabbitMQ URL is not a number")
            arguments["prefetch"] = int(given["prefetch"])
        return cls(server, **{**arguments, **overrides})

    @property
    def features(self) -> SourceFeatures:
        return SourceFeatures(Order.LANE)

    @property
    def description(self) -> str:
        return f"{self._server.description} {self._queue}"

    async def open(self, consumer: str, lanes: Lanes) -> None:
        """Consume. Raises Outage while the server is away or the queue is missing, ConfigError for a queue that keeps
        no order among several consumers. The lane comes with the first message: until then another process may read."""
        async with self._changing():
            if self._opened is None:
                self._session = await self._connect(consumer, lanes)
                self._opened = consumer, lanes

    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        if self._opened is None:
            raise ConfigError(f"{self.description} is not open; call open() first")
        session = self._session
        if session is not None and session.lost_by is not None:
            await self._drop(session)
            raise Outage(f"{self.description} cannot be read: {session.lost_by}; the consumer connects again")
        if session is None:
            await self._connect_again()
            return []
        if session.is_overdue(self._ack_seconds):
            await self._give_back(session)
            return []
        return await session.receive(limit, seconds)

    def settle(self, lane: Lane, position: int) -> None:
        if (session := self._of(lane)) is not None:
            session.settle(position)

    def pause(self, lane: Lane) -> None:
        if (session := self._of(lane)) is not None:
            session.is_paused = True

    def resume(self, lane: Lane) -> None:
        if (session := self._of(lane)) is not None:
            session.is_paused = False
            session.wake()

    async def lag(self) -> Mapping[Lane, int]:
        session = self._session
        if session is None or session.lane is None:
            return {}
        try:
            async with asyncio.timeout(self._connect_seconds):
                waiting = await session.count()
        except _LOST:
            return {}
        return {session.lane: waiting}

    async def close(self) -> None:
        """Acknowledge what is settled, and leave the queue to the next process."""
        async with self._changing():
            session, self._session, self._opened = self._session, None, None
            if session is not None:
                await session.close()

    def _of(self, lane: Lane) -> "_Session | None":
        return self._session if self._session is not None and self._session.lane is lane else None

    async def _connect_again(self) -> None:
        async with self._changing():
            if self._opened is not None and self._session is None:
                self._session = await self._connect(*self._opened)

    async def _connect(self, consumer: str, lanes: Lanes) -> "_Session":
        queue = self._queue.replace(_CONSUMER, consumer)
        _check_name(queue)
        connection = await AmqpConnection.connect(self._server, self._connect_seconds)
        try:
            async with asyncio.timeout(self._connect_seconds):
                if (reason := await connection.missing(queue=queue)) is not None:
                    raise Outage(
                        f"{self.description} cannot be read: {reason}; create the queue with {_SINGLE}, or give this "
                        "user permission to read"
                    )
                self._check(queue, await connection.differs(queue, {"x-queue-type": "quorum", _SINGLE: True}))
                session = _Session(connection, await connection.channel(confirms=False), queue, lanes)
                await session.begin(self._prefetch)
        except BaseException as error:
            if not isinstance(error, _LOST):
                await connection.close()
                raise
            await connection.abort()
            remedy = "; give this user permission to read" if isinstance(error, ChannelAccessRefused) else ""
            raise Outage(f"{self.description} cannot be read: {reason_of(error)}{remedy}") from error
        return session

    def _check(self, queue: str, difference: str | None) -> None:
        """Raise ConfigError for a queue that several processes would read at once, as far as the server tells it."""
        remedy = f"make queue {queue!r} anew with {_SINGLE}=true, so that one process at a time reads it"
        if difference is None or "'x-queue-type'" in difference:
            if difference is not None and "'stream'" in difference:
                raise ConfigError(f"{self.description} is a stream, which has no single reader; {remedy}")
            return
        if f"'{_SINGLE}'" in difference:
            raise ConfigError(f"{self.description} does not keep the order of keys; {remedy}")
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: the server does not tell whether queue '%s' has %s; only with it is the order of keys kept while "
                "several processes read",
                self.description,
                queue,
                _SINGLE,
                extra={"action": "queue_unchecked", "source": self.description},
            )

    async def _give_back(self, session: "_Session") -> None:
        """End the session before the server does, and let the consumer finish what runs."""
        if session.lane is not None:
            lane = session.lane
            try:
                async with asyncio.timeout(_REVOKE_SECONDS):
                    await session.lanes.revoked([lane])
            except TimeoutError:
                session.lanes.lost([lane])
        async with self._changing():
            if self._session is session:
                self._session = None
                await session.close()

    async def _drop(self, session: "_Session") -> None:
        async with self._changing():
            if self._session is session:
                self._session = None
                if session.lane is not None:
                    session.lanes.lost([session.lane])
                await session.close()


class _Session:
    """One channel that consumes the queue. The positions of its messages are their delivery tags."""

    def __init__(self, connection: AmqpConnection, channel: Channel, queue: str, lanes: Lanes) -> None:
        self.lane: Lane | None = None
        self.lanes = lanes
        self.is_paused = False
        self.lost_by: str | None = None
        self._connection = connection
        self._channel = channel
        self._queue = queue
        self._waiting: deque[DeliveredMessage] = deque()
        self._unsettled: deque[tuple[int, float]] = deque()  # delivery tag, and when it came
        self._settled = self._acknowledged = 0
        self._changed = asyncio.Event()
        self._to_acknowledge = asyncio.Event()
        self._is_closed = False
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, prefetch: int) -> None:
        self._channel.on_consumer_cancel_callbacks.add(self._cancelled)
        await self._channel.basic_qos(prefetch_count=prefetch)
        await self._channel.basic_consume(self._queue, self._delivered)
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._acknowledge_always())]

    async def _delivered(self, message: DeliveredMessage) -> None:
        self._waiting.append(message)
        self._unsettled.append((_tag(message), time.monotonic()))
        self._changed.set()

    async def _cancelled(self, _: Any) -> None:
        self._lose("the queue was deleted, or its leader went away")

    async def _watch(self) -> None:
        closing = self._channel.closing
        await asyncio.wait([closing])
        error = None if closing.cancelled() else closing.exception()
        self._lose("the connection was lost" if error is None else reason_of(error))

    def _lose(self, reason: str) -> None:
        if self.lost_by is None:
            self.lost_by = reason
        self._changed.set()

    def wake(self) -> None:
        self._changed.set()

    def is_overdue(self, seconds: float) -> bool:
        """Whether the server has waited this long for an answer to its first message."""
        return bool(self._unsettled) and time.monotonic() - self._unsettled[0][1] > seconds

    async def receive(self, limit: int, seconds: float) -> list[Message]:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._is_closed and self.lost_by is None and (self.is_paused or not self._waiting):
                    self._changed.clear()
                    await self._changed.wait()
        if self._is_closed or self.lost_by is not None or self.is_paused or not self._waiting:
            return []
        lane = self.lane
        if lane is None:
            lane = self.lane = Lane(self._queue)
            self.lanes.assigned([lane])
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        return [_message(lane, self._queue, each) for each in taken]

    def settle(self, position: int) -> None:
        while self._unsettled and self._unsettled[0][0] <= position:
            self._settled = self._unsettled.popleft()[0]
        self._to_acknowledge.set()

    async def count(self) -> int:
        """The messages that are in the queue, or came and are not settled."""
        return await self._connection.count(self._queue) + len(self._unsettled)

    async def close(self) -> None:
        """Acknowledge what is settled. The server gives the rest to the next one who reads."""
        self._is_closed = True
        self._changed.set()
        for task in self._tasks:
            await ended(task)
        with suppress(*_LOST):
            await self._acknowledge()
        await self._connection.close()

    async def _acknowledge_always(self) -> None:
        with suppress(*_LOST):  # what is not acknowledged comes again
            while True:
                await self._to_acknowledge.wait()
                self._to_acknowledge.clear()
                await self._acknowledge()

    async def _acknowledge(self) -> None:
        """All up to the last one that is settled, in one frame."""
        if self._settled > self._acknowledged:
            self._acknowledged = self._settled
            await self._channel.basic_ack(self._settled, multiple=True, wait=False)


def _check_name(queue: str) -> None:
    if not is_name(queue):
        raise ConfigError(
            f"queue={queue!r} is not a name that the RabbitMQ client takes; use up to 127 letters, digits and -_.:@#,/+"
        )


def _tag(message: DeliveredMessage) -> int:
    tag = message.delivery_tag
    assert tag is not None, "a delivery without a tag"
    return tag


def _message(lane: Lane, queue: str, delivered: DeliveredMessage) -> Message:
    properties = delivered.header.properties
    key: bytes | None = None
    headers: list[tuple[str, bytes]] = []
    for name, value in (properties.headers or {}).items():
        form = _FORMS.get(type(value))
        if form is None or name == _COUNTER:
            continue
        if name == KEY_HEADER:
            key = form(value)
        else:
            headers.append((name, form(value)))
    written_at = properties.timestamp
    return Message(
        lane,
        _tag(delivered),
        delivered.exchange or queue,
        key,
        delivered.body,
        headers,
        properties.content_type,
        properties.message_id,
        written_at if written_at is None or written_at.tzinfo else written_at.replace(tzinfo=UTC),
    )


def _text(value: object) -> bytes:
    return str(value).encode()


# Other values, such as tables, have no form as text and are left out.
_FORMS: Final[Mapping[type, Callable[[Any], bytes]]] = {
    str: _text,
    bytes: bytes,
    bytearray: bytes,
    int: _text,
    float: _text,
    datetime: lambda value: value.isoformat().encode(),
}
