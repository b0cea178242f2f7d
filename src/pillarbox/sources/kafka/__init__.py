"""Messages from Kafka, as a member of a consumer group."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.kafka.settings import servers_of
from pillarbox.source import Lane, Lanes, Message, Order, SourceFeatures
from pillarbox.sources.kafka.settings import OPTIONS, Start, check_start, client_config, parse_url, topics_of
from pillarbox.threads import Thread, finished

try:
    from pillarbox.sources.kafka.reader import Reader
    from pillarbox.sources.kafka.subscription import Subscription
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("confluent_kafka"):
        raise
    raise MissingExtra("KafkaSource", "kafka") from error

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 10.0


class KafkaSource:
    """Reads topics of one Kafka cluster. A lane is one assignment of a partition.

    servers: ``host:port``, several with commas.
    topic: one or several, with commas or as a sequence.
    group: the consumer group; default: the consumer's name.
    start: where a group begins that has committed nothing: ``earliest`` or ``latest``.
    properties: of librdkafka, passed on; one that would break a promise raises ConfigError.
    connect_timeout: how long ``open`` waits for a broker.
    """

    options = frozenset({*OPTIONS, "properties"})

    def __init__(
        self,
        *,
        servers: str | Sequence[str],
        topic: str | Sequence[str] = "",
        group: str = "",
        start: Start = "earliest",
        properties: Mapping[str, Any] | None = None,
        connect_timeout: Duration = "5s",
    ) -> None:
        self._servers = servers_of(servers)
        self._topics = topics_of(topic)
        check_start(start)
        self._group, self._start = group, start
        self._connect_seconds = seconds_of("connect_timeout", connect_timeout, "1ms", "1h")
        self._config = client_config(self._servers, properties or {})
        self._thread: Thread | None = None
        self._reader: Reader | None = None
        self._asked: asyncio.Future[list[Message]] | None = None
        self._ready: list[Message] = []

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """From ``kafka://host:9092,host2:9092?topic=orders&group=cards``; overrides are arguments too."""
        arguments = parse_url(url)
        properties = {**arguments.pop("properties"), **(overrides.pop("properties", None) or {})}
        return cls(**{**arguments, "properties": properties, **overrides})

    @property
    def features(self) -> SourceFeatures:
        return SourceFeatures(Order.LANE)

    @property
    def description(self) -> str:
        return f"kafka {self._servers} {','.join(self._topics)}"

    async def open(self, consumer: str, lanes: Lanes) -> None:
        """Join the group."""
        if self._reader is not None:
            return
        what = Subscription(self._config, self._topics, self._group or consumer, self._start, self.description)
        reader = Reader(what, lanes, asyncio.get_running_loop())
        thread = Thread("pillarbox-kafka-source")
        try:
            await finished(thread.submit(partial(reader.connect, self._connect_seconds)))
        except BaseException:
            reader.leave()
            thread.submit(reader.close)
            thread.stop()
            raise
        self._reader, self._thread = reader, thread

    async def receive(self, limit: int, seconds: float) -> Sequence[Message]:
        """Up to ``limit`` messages. Cancelled, it loses none: they come with the next call."""
        reader, thread = self._opened()
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self._ready:
            asked = self._asked
            if asked is None:
                asked = self._asked = asyncio.wrap_future(thread.submit(partial(reader.read, limit)))
            await asyncio.wait([asked])
            if asked.cancelled():  # the source was closed meanwhile
                return []
            self._asked = None
            self._ready = asked.result()
            if loop.time() >= until:
                break
        taken, self._ready = self._ready[:limit], self._ready[limit:]
        return taken

    def settle(self, lane: Lane, position: int) -> None:
        if self._reader is not None:
            self._reader.settle(lane, position)

    def pause(self, lane: Lane) -> None:
        if self._reader is not None:
            self._reader.pause(lane, True)

    def resume(self, lane: Lane) -> None:
        if self._reader is not None:
            self._reader.pause(lane, False)

    async def lag(self) -> Mapping[Lane, int]:
        """Messages between what is settled and the end of each partition."""
        reader, thread = self._opened()
        return await finished(thread.submit(reader.lag))

    async def close(self) -> None:
        """Commit what is settled, and leave the group. Waits 10 s for a broker that does not answer."""
        reader, thread = self._reader, self._thread
        self._reader = self._thread = None
        if self._asked is not None:
            self._asked.cancel()  # else its error would be reported as one that nobody asked for
        self._ready, self._asked = [], None
        if reader is None or thread is None:
            return
        reader.leave()
        closing = asyncio.wrap_future(thread.submit(reader.close))
        try:
            await asyncio.wait([closing], timeout=CLOSE_SECONDS)
            if closing.done():
                closing.result()
                return
            closing.cancel()
            thread.submit(reader.close)  # if it had not begun, this one ends the client later
        finally:
            thread.stop()
        logger.warning(
            "%s does not answer; the offsets that are not committed yet bring copies",
            self.description,
            extra={"action": "kafka_close_unanswered", "source": self.description},
        )

    def _opened(self) -> tuple[Reader, Thread]:
        if self._reader is None or self._thread is None:
            raise ConfigError(f"{self.description} is not open; call open() first")
        return self._reader, self._thread
