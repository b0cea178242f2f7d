"""Messages of Pulsar by a Key_Shared subscription: several consumers share them, and each key has one of them."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self, Unpack

from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import ConfigError, MissingExtra, Outage
from pillarbox.hints import hint
from pillarbox.pulsar.settings import SOURCE_OPTIONS, LoginOptions, login_of, namespace_of, parse_url
from pillarbox.source import Lane, Lanes, Message, Order, SourceFeatures
from pillarbox.tasks import PerLoop
from pillarbox.threads import Thread, finished

try:
    import pulsar

    from pillarbox.pulsar.client import STARTS, new_client, new_consumer
except ModuleNotFoundError as error:
    if error.name not in ("pulsar", "_pulsar"):
        raise
    raise MissingExtra("PulsarSource", "pulsar") from error

_PARTITION: Final = re.compile(r"-partition-\d+$")
_PATIENCE_SECONDS: Final = 5.0  # without a connection, until a new client is tried
_WAIT_SECONDS: Final = 0.1  # one wait for a first message: a close, and what was settled, wait for its end


class PulsarSource:
    """Reads topics of one Pulsar cluster.

    A consumer's name is the name of its subscription. All that one process reads is one lane. Messages that are not
    settled when it ends come again, to any consumer of that name.

    servers: ``host:port``, several with commas.
    topic: one topic, or several with commas.
    namespace: of topics that are given by name alone.
    start: where a new subscription begins: ``earliest`` or ``latest``.
    connect_timeout: the longest time of a question to the cluster.
    login: TLS and credentials; see LoginOptions.
    """

    options = frozenset(SOURCE_OPTIONS)

    def __init__(
        self,
        *,
        servers: str | Sequence[str],
        topic: str,
        namespace: str = "public/default",
        start: str = "earliest",
        connect_timeout: Duration = "5s",
        **login: Unpack[LoginOptions],
    ) -> None:
        self._login = login_of(servers, login)
        if not topic:
            raise ConfigError("no Pulsar topic is given; write for instance topic=orders")
        if start not in STARTS:
            raise ConfigError(f"start={start!r} is unknown; {hint(start, list(STARTS))}")
        self._topic = topic
        self._topics = [namespace_of(namespace).topic(name) for name in topic.split(",")]
        self._start = start
        self._seconds = seconds_of("connect_timeout", connect_timeout, "1s", "1h")
        self._thread: Thread | None = None
        self._session: _Session | None = None
        self._open: Callable[[], _Session] | None = None
        self._changing = PerLoop(asyncio.Lock)

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """From ``pulsar://host:6650/tenant/namespace?topic=orders``; ``pulsar+ssl://`` uses TLS."""
        return cls(**{"topic": "", **parse_url(url, SOURCE_OPTIONS), **overrides})

    @property
    def features(self) -> SourceFeatures:
        # The client cannot ask how many messages wait.
        return SourceFeatures(Order.KEY, lag=False)

    @property
    def description(self) -> str:
        return f"{self._login.description} {self._topic}"

    async def open(self, consumer: str, lanes: Lanes) -> None:
        """Subscribe. Raises Outage while the cluster is away, refuses this client, or lacks the topic."""
        async with self._changing():
            if self._open is None:
                self._thread = Thread("pillarbox-pulsar-source")
                self._open = partial(self._subscribe, consumer, lanes)
                try:
                    await self._reopen()
                except BaseException:
                    self._leave()
                    raise

    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        """Up to ``limit`` messages. After the topic was deleted or unloaded for good this subscribes again."""
        if self._open is None or self._thread is None:
            raise ConfigError(f"{self.description} is not open; call open() first")
        if self._session is None:
            async with self._changing():
                if self._session is None:
                    await self._reopen()
        session = self._session
        if session is None:
            return []
        if session.is_paused:
            await asyncio.sleep(seconds)
            return []
        try:
            return await finished(self._thread.submit(partial(session.receive, limit, seconds)), session.interrupt)
        except Outage:
            if session.away_seconds() < _PATIENCE_SECONDS or not await self._replaced(session):
                raise
            return []
        except pulsar.PulsarException as error:
            self._session = None
            session.lanes.lost([session.lane])
            await finished(self._thread.submit(session.close))
            raise self._outage(error) from error

    def settle(self, lane: Lane, position: int) -> None:
        session = self._of(lane)
        if session is not None and self._thread is not None:
            session.settle_to(position)
            self._thread.submit(session.acknowledge)

    def pause(self, lane: Lane) -> None:
        session = self._of(lane)
        if session is not None:
            session.is_paused = True

    def resume(self, lane: Lane) -> None:
        session = self._of(lane)
        if session is not None:
            session.is_paused = False

    async def lag(self) -> Mapping[Lane, int]:
        """Empty: the client cannot ask."""
        return {}

    async def close(self) -> None:
        """Acknowledge what is settled, and leave."""
        async with self._changing():
            session, self._session = self._session, None
            if session is not None and self._thread is not None:
                session.interrupt()
                await finished(self._thread.submit(session.close))
            self._leave()

    def _leave(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self._thread = self._open = None

    def _of(self, lane: Lane) -> "_Session | None":
        session = self._session
        return session if session is not None and session.lane is lane else None

    async def _reopen(self) -> None:
        if self._open is None or self._thread is None:
            return
        try:
            self._session = await self._subscribed(self._thread, self._open)
        except pulsar.PulsarException as error:
            raise self._outage(error) from error
        self._session.lanes.assigned([self._session.lane])

    @staticmethod
    async def _subscribed(thread: Thread, subscribe: Callable[[], "_Session"]) -> "_Session":
        call: Future[_Session] = thread.submit(subscribe)
        try:
            return await finished(call)
        except asyncio.CancelledError:
            if not call.cancelled() and call.exception() is None:
                thread.submit(call.result().close)  # else this member would keep messages that nobody settles
            raise

    async def _replaced(self, session: "_Session") -> bool:
        """Whether a new client could subscribe. The old one waits up to a minute before it connects again."""
        async with self._changing():
            if self._open is None or self._thread is None or self._session is not session:
                return False
            try:
                new = await self._subscribed(self._thread, self._open)
            except pulsar.PulsarException:
                return False
            self._session = new
            session.lanes.lost([session.lane])
            await finished(self._thread.submit(session.close))
            new.lanes.assigned([new.lane])
            return True

    def _subscribe(self, consumer: str, lanes: Lanes) -> "_Session":
        client = new_client(self._login, self._seconds)
        try:
            reading = new_consumer(client, self._topics, consumer, start=self._start)
        except BaseException:
            _close(client)
            raise
        return _Session(client, reading, Lane(f"{self._topic}/{consumer}"), lanes, self.description)

    def _outage(self, error: Exception) -> Outage:
        problem = type(error).__name__
        # The client reports a refused login or certificate as a broker that does not answer.
        remedy = _REMEDIES.get(
            problem,
            "see whether a broker listens there, and takes these credentials and certificates",
        )
        return Outage(f"{self.description} cannot be read ({problem}); {remedy}")


_REMEDIES: Final = {
    "TopicNotFound": "create the topic, or its namespace",
    "AuthenticationError": "correct the credentials",
    "AuthorizationError": "grant this client the permission to consume",
    "ConsumerBusy": "the subscription exists with another type or has too many consumers; use another consumer's name",
}


class _Session:
    """One subscription. ``receive``, ``acknowledge`` and ``close`` belong into its thread."""

    def __init__(self, client: Any, consumer: Any, lane: Lane, lanes: Lanes, description: str) -> None:
        self.lane = lane
        self.lanes = lanes
        self.is_paused = False
        self._client = client
        self._consumer = consumer
        self._description = description
        self._received = 0  # the positions of messages are 0, 1, 2 ...
        self._settled = 0  # the first position that is not settled
        self._acknowledged = 0
        self._in_hand: dict[int, tuple[str, Any]] = {}  # place and message id by position, until acknowledged
        self._places: set[str] = set()  # those of them that are not settled
        self._is_interrupted = False
        self._away_since: float | None = None

    def away_seconds(self) -> float:
        """How long nothing came, because the cluster was away."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def interrupt(self) -> None:
        """Have ``receive`` return soon."""
        self._is_interrupted = True

    def settle_to(self, position: int) -> None:
        """On the event loop, while the thread may receive: each step is one operation of the interpreter."""
        while self._settled <= min(position, self._received - 1):
            self._places.discard(self._in_hand[self._settled][0])
            self._settled += 1

    def acknowledge(self) -> None:
        """Acknowledge what is settled, one by one: a Key_Shared subscription has no other way."""
        while self._acknowledged < self._settled:
            _, identity = self._in_hand.pop(self._acknowledged)
            self._acknowledged += 1
            # What cannot be acknowledged now comes again.
            with suppress(pulsar.PulsarException):
                self._consumer.acknowledge(identity)

    def receive(self, limit: int, seconds: float) -> list[Message]:
        """Raises Outage when nothing comes because the cluster is away."""
        found: list[Message] = []
        until = time.monotonic() + seconds
        while not found and not self._is_interrupted:
            self.acknowledge()
            wait = min(_WAIT_SECONDS, until - time.monotonic())
            if wait <= 0:
                break
            self._take(found, wait)
        while found and len(found) < limit and self._take(found, 0):
            continue
        is_idle = not found and not self._is_interrupted
        self._is_interrupted = False
        is_away = is_idle and not self._consumer.is_connected()
        self._away_since = (self._away_since or time.monotonic()) if is_away else None
        if is_away:
            raise Outage(f"{self._description} cannot be reached; the consumer tries again")
        return found

    def close(self) -> None:
        self.acknowledge()
        _close(self._client)

    def _take(self, found: list[Message], seconds: float) -> bool:
        """Add the next message. False: none came."""
        try:
            message = self._consumer.receive(max(1, round(seconds * 1000)))
        except pulsar.Timeout:
            return False
        identity = message.message_id()
        topic = message.topic_name()
        place = f"{topic}/{identity.ledger_id()}/{identity.entry_id()}/{identity.batch_index()}"
        # After a lost connection the broker sends again what is in hand here.
        if place not in self._places:
            self._places.add(place)
            self._in_hand[self._received] = place, identity
            key = message.partition_key()
            found.append(
                Message(
                    self.lane,
                    self._received,
                    _PARTITION.sub("", topic),
                    key.encode() if key else None,
                    message.data(),
                    tuple((name, value.encode()) for name, value in message.properties().items()),
                    written_at=datetime.fromtimestamp(message.publish_timestamp() / 1000, UTC),
                    place=place,
                )
            )
            self._received += 1
        return True


def _close(client: Any) -> None:
    with suppress(pulsar.PulsarException):
        client.close()
