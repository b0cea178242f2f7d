"""Kafka's consumer and its lanes, in one thread."""

import asyncio
import logging
import time
import warnings
from collections.abc import Sequence
from typing import Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from pillarbox.errors import ConfigError, Outage
from pillarbox.kafka.errors import config_error
from pillarbox.source import Lane, Lanes, Message
from pillarbox.sources.kafka.partition import Partition, message_of
from pillarbox.sources.kafka.subscription import AWAY, COMING, MOVING, UNKNOWN, Subscription

logger = logging.getLogger("pillarbox.sources.kafka")

COMMIT_SECONDS: Final = 1.0
REVOKE_SECONDS = 10.0
CHECK_SECONDS = 30.0
# A call in the thread lasts at most so long, so that others get their turn.
_POLL_SECONDS: Final = 0.1
# The same while a lane is paused: its consumer will soon want more.
_PAUSED_POLL_SECONDS: Final = 0.02
_ASK_SECONDS: Final = 5.0
_PROBE_SECONDS: Final = 1.0
_AGAIN_SECONDS: Final = 0.1


class Reader:
    """``settle``, ``pause`` and ``leave`` are called on the event loop, all else in one thread."""

    def __init__(self, what: Subscription, lanes: Lanes, loop: asyncio.AbstractEventLoop) -> None:
        self._what = what
        self._lanes = lanes
        self._loop = loop
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._by_lane: dict[Lane, Partition] = {}
        self._commit_at = 0.0
        self._check_at = time.monotonic() + CHECK_SECONDS
        self._is_missing = False  # a topic, at the last check
        self._reads = 0
        self._down: str | None = None
        self._problem: Exception | None = None
        self._is_closing = False
        self._consumer: Any = None
        config = {
            **what.config,
            "group.id": what.group,
            "error_cb": self._note,
            "on_commit": self._committed,
            "logger": logging.getLogger("pillarbox.sources.kafka.client"),
        }
        try:
            self._consumer = Consumer(config)
        except (KafkaException, TypeError, ValueError) as error:
            raise config_error(error) from error

    def settle(self, lane: Lane, position: int) -> None:
        partition = self._by_lane.get(lane)
        if partition is not None:
            partition.settle(position)

    def pause(self, lane: Lane, is_wanted: bool) -> None:
        partition = self._by_lane.get(lane)
        if partition is not None:
            partition.wants_pause = is_wanted

    def leave(self) -> None:
        """Wait neither for the consumer nor for offsets any more, because ``close`` is the next call."""
        self._is_closing = True

    def connect(self, seconds: float) -> None:
        """Join the group. Raises Outage when no broker answers, ConfigError for what this client may not read."""
        until = time.monotonic() + seconds
        for topic in self._what.topics:
            while (error := self._error_of(topic, seconds)) is not None:
                # Tells _note of brokers, and says here that the group is refused, for which no call fails.
                if (told := self._consumer.poll(0)) is not None:
                    self._note_in_place(told)
                self._raise_problem()
                if error.code() not in COMING or time.monotonic() >= until:
                    raise self._explained(error, topic)
                time.sleep(_AGAIN_SECONDS)
        self._consumer.subscribe(
            list(self._what.topics), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def read(self, limit: int) -> list[Message]:
        """Up to ``limit`` messages; none after a short time without one."""
        self._raise_problem()
        self._apply_pauses()
        if time.monotonic() >= self._commit_at:
            self._commit_at = time.monotonic() + COMMIT_SECONDS
            self._commit(self._partitions.values(), waits=False)
        if time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_SECONDS
            self._check_topics()
        is_paused = any(partition.is_paused for partition in self._partitions.values())
        first = self._consumer.poll(_PAUSED_POLL_SECONDS if is_paused else _POLL_SECONDS)
        if first is None:
            if self._down is not None:
                self._probe()
            return []
        self._reads += 1
        # A rebalance can come with the next call, and take the lane of this message away.
        lane_of_first = self._lane_of(first)
        others = self._consumer.consume(limit - 1, 0) if limit > 1 else []
        messages = []
        if lane_of_first is not None and lane_of_first is self._lane_of(first):
            messages.append(self._delivered(first, lane_of_first))
        for raw in others:
            lane = self._lane_of(raw)
            if lane is not None:
                messages.append(self._delivered(raw, lane))
        if not messages:
            self._raise_problem()
        return messages

    def _delivered(self, raw: Any, lane: Lane) -> Message:
        self._by_lane[lane].delivered = raw.offset() + 1
        return message_of(raw, lane)

    def lag(self) -> dict[Lane, int]:
        """Messages that are not settled, of each lane of which it is known."""
        found = {}
        for partition in self._partitions.values():
            # The client learns the end of a partition with each fetch, and it fetches nothing for a paused one.
            is_known = partition.settled is not None and not partition.is_paused
            ends = self._consumer.get_watermark_offsets(partition.at(), cached=True) if is_known else (-1, -1)
            try:
                if ends[1] < 0:
                    ends = self._consumer.get_watermark_offsets(partition.at(), timeout=_PROBE_SECONDS)
            except KafkaException:
                return {}  # a part of it would pass for all
            begin = partition.settled if partition.settled is not None else ends[0]
            found[partition.lane] = max(0, ends[1] - begin)
        return found

    def close(self) -> None:
        """Commit what is settled, and leave the group. Safe to call again."""
        self._commit(self._partitions.values(), waits=True)
        self._by_lane.clear()
        self._partitions.clear()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def __del__(self) -> None:
        # The client's own end waits for a rebalance that nobody serves any more, and the whole process with it.
        if self._consumer is not None:
            warnings.warn(
                f"a source of {self._what.description} was not closed", ResourceWarning, stacklevel=2, source=self
            )
            self.leave()
            self._partitions.clear()
            self._consumer.close()

    def _error_of(self, topic: str, seconds: float) -> Any:
        """Why this group cannot read a topic; None: it can."""
        try:
            error = self._consumer.list_topics(topic, timeout=seconds).topics[topic].error
            if error is None:
                (found,) = self._consumer.committed([TopicPartition(topic, 0)], timeout=seconds)
                error = found.error
        except KafkaException as failure:
            error = failure.args[0]
        return error

    def _check_topics(self) -> None:
        """Raises ConfigError for a topic that was deleted. The client does not tell: it fetches on, or gives its
        partitions back and waits."""
        missing = None
        for topic in self._what.topics:
            try:
                error = self._consumer.list_topics(topic, timeout=_PROBE_SECONDS).topics[topic].error
            except KafkaException:
                return  # the cluster is away, which the next fetch says
            if error is not None and error.code() in UNKNOWN:
                missing = self._explained(error, topic)
        # A broker that has just started may not know all topics: it is asked twice.
        if missing is not None and self._is_missing:
            raise missing
        self._is_missing = missing is not None

    def _lane_of(self, raw: Any) -> Lane | None:
        """The lane of a message; None: it is gone, or this is an error."""
        if raw.error() is not None:
            self._note_in_place(raw)
            return None
        partition = self._partitions.get((raw.topic(), raw.partition()))
        return None if partition is None else partition.lane

    def _apply_pauses(self) -> None:
        for partition in self._partitions.values():
            if partition.wants_pause is not partition.is_paused:
                partition.is_paused = partition.wants_pause
                (self._consumer.pause if partition.is_paused else self._consumer.resume)([partition.at()])

    def _on_assign(self, _consumer: Any, given: Sequence[Any]) -> None:
        if not given:
            return
        starts = self._starts(given)
        if self._is_closing or not starts:
            return
        lanes = []
        for place, committed in starts:
            key = (place.topic, place.partition)
            known = place.offset if place.offset >= 0 else None
            partition = Partition(
                Lane(f"{key[0]}/{key[1]}"), *key, settled=known, committed=committed, read_in=self._reads
            )
            self._partitions[key] = self._by_lane[partition.lane] = partition
            lanes.append(partition.lane)
        # Before the first message of these lanes.
        self._loop.call_soon_threadsafe(self._lanes.assigned, lanes)
        places = [place for place, _ in starts]
        self._consumer.incremental_assign(places)
        self._consumer.resume(places)  # the client remembers a pause of an earlier assignment

    def _starts(self, given: Sequence[Any]) -> list[tuple[Any, int | None]]:
        """Where to begin with each partition, and what is committed. Asks until the broker answers."""
        while not self._is_closing:
            try:
                return [
                    self._start(found)
                    for found in self._consumer.committed(
                        [TopicPartition(each.topic, each.partition) for each in given], timeout=_ASK_SECONDS
                    )
                ]
            except KafkaException as error:
                explained = self._explained(error.args[0], given[0].topic)
                if isinstance(explained, ConfigError):
                    self._problem = explained
                    return []
                time.sleep(_AGAIN_SECONDS)
                if error.args[0].code() in COMING:
                    continue
                logger.warning(
                    "%s does not tell the offsets of group %r (%s); asking again",
                    self._what.description,
                    self._what.group,
                    error.args[0].str(),
                    extra={"action": "kafka_offsets_unknown", "source": self._what.description},
                )
        return []

    def _start(self, found: Any) -> tuple[Any, int | None]:
        if found.error is not None:
            raise KafkaException(found.error)
        if found.offset >= 0:
            return found, found.offset
        if self._what.start == "earliest":
            return TopicPartition(found.topic, found.partition, OFFSET_BEGINNING), None
        # As a number, which is committed soon: else a consumer that dies before its first message would begin
        # at a later end.
        end = self._consumer.get_watermark_offsets(found, timeout=_ASK_SECONDS)[1]
        return TopicPartition(found.topic, found.partition, end), None

    def _on_revoke(self, _consumer: Any, taken: Sequence[Any]) -> None:
        leaving = self._leaving(taken)
        if not leaving:
            return
        if not self._is_closing:  # else the consumer has finished
            finishing = self._finish([partition.lane for partition in leaving])
            asyncio.run_coroutine_threadsafe(finishing, self._loop).result()
        self._commit(leaving, waits=True)
        self._forget(leaving)

    def _on_lost(self, _consumer: Any, taken: Sequence[Any]) -> None:
        leaving = self._leaving(taken)
        self._forget(leaving)
        if leaving and not self._is_closing:
            self._loop.call_soon_threadsafe(self._lanes.lost, [partition.lane for partition in leaving])

    async def _finish(self, lanes: Sequence[Lane]) -> None:
        """On the event loop: let the consumer finish what it has of these lanes."""
        try:
            async with asyncio.timeout(REVOKE_SECONDS):
                await self._lanes.revoked(lanes)
        except TimeoutError:
            logger.warning(
                "%s takes %d partitions away, and their events were not done after %g s: another consumer of group %r "
                "gets those that are not settled",
                self._what.description,
                len(lanes),
                REVOKE_SECONDS,
                self._what.group,
                extra={"action": "kafka_revoke_unfinished", "source": self._what.description},
            )
            self._lanes.lost(lanes)

    def _leaving(self, taken: Sequence[Any]) -> list[Partition]:
        keys = [(each.topic, each.partition) for each in taken]
        return [self._partitions[key] for key in keys if key in self._partitions]

    def _forget(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            del self._partitions[partition.topic, partition.number]
            del self._by_lane[partition.lane]

    def _commit(self, partitions: Any, *, waits: bool) -> None:
        offsets = []
        for partition in partitions:
            if partition.is_settled:
                partition.committed = partition.settled
                offsets.append(partition.at(partition.settled))
        if not offsets:
            return
        try:
            for answer in self._consumer.commit(offsets=offsets, asynchronous=not waits) or []:
                if answer.error is not None:
                    raise KafkaException(answer.error)
        except KafkaException as error:
            self._committed(error.args[0], offsets)

    def _committed(self, error: Any, offsets: Sequence[Any]) -> None:
        """The answer to a commit."""
        if error is None:
            return
        for each in offsets:
            if (partition := self._partitions.get((each.topic, each.partition))) is not None:
                partition.committed = None
        if error.code() in MOVING:
            logger.debug("%s did not take offsets during a rebalance: %s", self._what.description, error.str())
            return
        logger.warning(
            "%s did not take the offsets of %d partitions (%s); they are committed again while this consumer has them",
            self._what.description,
            len(offsets),
            error.str(),
            extra={"action": "kafka_commit_failed", "source": self._what.description},
        )

    def _note(self, error: Any) -> None:
        """An error of the client as a whole."""
        if error.code() in AWAY and (self._down is None or error.code() == KafkaError._AUTHENTICATION):
            self._down = error.str()

    def _note_in_place(self, raw: Any) -> None:
        """An error that came in place of a message."""
        error = raw.error()
        partition = self._partitions.get((raw.topic(), raw.partition()))
        if error.code() == KafkaError._PARTITION_EOF:
            # Of a partition that came in the middle of a call for several messages, it may be an older end.
            if partition is not None and partition.read_in != self._reads:
                partition.reached(raw.offset())
            return
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            if partition is not None:
                self._loop.call_soon_threadsafe(
                    self._lanes.failed, partition.lane, self._what.gone(partition, raw.offset())
                )
            return
        if error.code() == KafkaError._FATAL:
            self._problem = self._what.shut_out(error)
            return
        explained = self._explained(error, raw.topic() or ", ".join(self._what.topics))
        if isinstance(explained, ConfigError):
            self._problem = explained
            return
        if error.code() in AWAY:
            self._note(error)
            return
        logger.warning(
            "%s: %s",
            self._what.description,
            error.str(),
            extra={"action": "kafka_error", "source": self._what.description},
        )

    def _explained(self, error: Any, topic: str) -> ConfigError | Outage:
        return self._what.explain(error, topic, self._down)

    def _probe(self) -> None:
        """After an error of all brokers: raises Outage while none answers."""
        try:
            self._consumer.list_topics(self._what.topics[0], timeout=_PROBE_SECONDS)
        except KafkaException as error:
            raise self._explained(error.args[0], self._what.topics[0]) from error
        self._down = None

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem
