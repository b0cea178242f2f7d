"""The progress of shards in Kafka: a compacted topic for each stream, with a partition for each shard. Blocking."""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition

from pillarbox.envelopes import Message
from pillarbox.errors import ConfigError, Outage
from pillarbox.publisher import Place
from pillarbox.publishers.kafka.topics import ASK_SECONDS, DESCRIBE_SECONDS, Topics, kafka_admin

# A new topic, or one whose leader moves, is not known everywhere at once.
_SETTLING: Final = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError._NOENT,  # the client knows no leader yet
)
_DENIED: Final = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
)
_READ_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.05
_TICK_SECONDS: Final = 0.1
# A transaction takes two places of its partition: the record and the marker of its end.
_LAST_PLACES: Final = 64
_FURTHER: Final = 16
TICKET_BYTES: Final = 2_000_000
"""The most that a ticket takes: a stream's batch has 100,000 events at most, with 16 bytes for each."""
# Segments that are soon old enough for the compaction.
_SETTINGS: Final = {
    "cleanup.policy": "compact",
    "max.message.bytes": str(TICKET_BYTES),
    "segment.bytes": "16777216",
}
_TOPIC: Final = "topic"
_PLAIN: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


def stream_part(stream: str) -> str:
    """The name of a stream in the names of topics and transactions; a hash where Kafka does not take its letters."""
    return stream if _PLAIN.fullmatch(stream) else f"stream-{hashlib.sha256(stream.encode()).hexdigest()[:32]}"


def transactional_id(place: Place) -> str:
    return f"{place.identity}.{stream_part(place.stream)}.{place.shard}"


def progress_topic(place: Place) -> str:
    return f"{place.identity}.{stream_part(place.stream)}.progress"


def end_key(place: Place) -> bytes:
    """The key of the records that have no ticket. Compaction keeps the last record of each key."""
    return f"{place.stream}/{place.shard}/end".encode()


def commands(place: Place) -> str:
    """The commands for what this client may not do itself."""
    name = progress_topic(place)
    settings = " ".join(f"--config {key}={value}" for key, value in _SETTINGS.items())
    return (
        f"kafka-topics --create --topic {name} --partitions {place.shards} {settings}; "
        f"kafka-acls --add --allow-principal User:<relay> --resource-pattern-type prefixed --topic {place.identity}. "
        "--operation Read --operation Write --operation Describe --operation DescribeConfigs; "
        f"kafka-acls --add --allow-principal User:<relay> --resource-pattern-type prefixed --transactional-id "
        f"{place.identity}. --operation Write --operation Describe"
    )


class ProgressTopics:
    """Makes, checks and reads the progress topics of one cluster. Shared between threads."""

    def __init__(self, config: Mapping[str, Any], topics: Topics, description: str, default_topic: str) -> None:
        self._config = {
            **config,
            "group.id": "pillarbox",  # the client wants one, and no group is joined
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
        self._topics = topics
        self._description = description
        self._default_topic = default_topic
        self._ready: set[str] = set()
        self._lock = threading.Lock()

    def prepare(self, place: Place) -> None:
        """Make the topic if it is missing. Raises Outage, or ConfigError for a topic that cannot serve."""
        name = progress_topic(place)
        with self._lock:
            if name in self._ready:
                return
            try:
                if not self._check(place, name):
                    self._make(place, name)
            except KafkaException as error:
                raise self.outage(place, error.args[0]) from error
            self._ready.add(name)

    def forget(self, place: Place) -> None:
        """Check the topic again before the next use."""
        self._ready.discard(progress_topic(place))

    def _check(self, place: Place, name: str) -> bool:
        (answer,) = self._topics.admin.describe_topics(
            TopicCollection([name]), request_timeout=DESCRIBE_SECONDS
        ).values()
        try:
            count = len(answer.result().partitions)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return False
            raise
        if count != place.shards:
            raise ConfigError(
                f"the progress topic {name!r} has {count} partitions, and the outbox has {place.shards} shards: the "
                "number of shards was changed; drain the stream, give the outbox a new identity with "
                "`pillarbox identity --new`, and start the relay again"
            )
        policy = self._settings(name).get("cleanup.policy")
        if policy is not None and policy != "compact":
            raise ConfigError(
                f"the progress topic {name!r} has cleanup.policy={policy}, which forgets what was published; run: "
                f"kafka-configs --alter --entity-type topics --entity-name {name} --add-config cleanup.policy=compact"
            )
        return True

    def _settings(self, name: str) -> dict[str, str]:
        """The settings of a topic; none if this client may not ask."""
        resource = kafka_admin.ConfigResource(kafka_admin.ResourceType.TOPIC, name)
        (answer,) = self._topics.admin.describe_configs([resource], request_timeout=DESCRIBE_SECONDS).values()
        try:
            return {key: entry.value for key, entry in answer.result().items()}
        except KafkaException as error:
            if error.args[0].code() in _DENIED:
                return {}
            raise

    def _make(self, place: Place, name: str) -> None:
        """With as many replicas as the default topic, because both must survive the same."""
        copies, settings = -1, dict(_SETTINGS)
        if self._default_topic:
            (answer,) = self._topics.admin.describe_topics(
                TopicCollection([self._default_topic]), request_timeout=DESCRIBE_SECONDS
            ).values()
            copies = min(len(partition.replicas) for partition in answer.result().partitions)
            if in_sync := self._settings(self._default_topic).get("min.insync.replicas"):
                settings["min.insync.replicas"] = in_sync
        new = kafka_admin.NewTopic(name, place.shards, copies, config=settings)
        try:
            self._topics.admin.create_topics([new], request_timeout=DESCRIBE_SECONDS)[name].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    def record(self, place: Place, ticket: bytes) -> Message:
        """The message with a ticket. It also names the topic for events without one of their own."""
        return Message(f"{place.stream}/{place.shard}".encode(), ticket, [(_TOPIC, self._default_topic.encode())])

    def _ticket(self, record: Any) -> bytes:
        """The ticket of a record. Raises ConfigError if its events went to another topic: they would count as published
        in this database, and be missing in its topic."""
        topic = dict(record.headers() or ()).get(_TOPIC, b"").decode()
        if topic != self._default_topic:
            raise ConfigError(
                f"the progress topic {record.topic()!r} is of a stream with topic={topic or '*'}, and this one has "
                f"topic={self._default_topic or '*'}: if this database is a copy, run `pillarbox identity --new`; if "
                "the topic was changed, drain the stream with the old one before you run it"
            )
        return bytes(record.value())

    def last(self, place: Place, mark: Callable[[], int], stop: threading.Event) -> bytes:
        """The last committed ticket of a shard; empty: there is none. Call it after ``init_transactions``: what was
        under way before has ended then.

        mark: commits a record without a ticket behind all others, and returns its place. A broker that was frozen or
        cut off can still take itself for the leader and know of nothing newer, so what it calls the end proves nothing.
        Who has read this record has read all before it.
        """
        deadline = time.monotonic() + _READ_SECONDS
        partition = TopicPartition(progress_topic(place), place.shard)
        end: int | None = None
        while True:
            try:
                if end is None:
                    # The record would end a transaction that Kafka has left open, and not as it was decided.
                    self._wait_until_ended(partition, stop, deadline)
                    end = mark()
                return self._last(partition, end, stop, deadline)
            except KafkaException as error:
                is_settling = error.args[0].code() in _SETTLING
                with suppress(KafkaException):
                    # The client keeps for a while that it did not know a topic, until it learns of all topics.
                    self._topics.admin.list_topics(timeout=ASK_SECONDS)
                if not is_settling or stop.is_set() or time.monotonic() > deadline:
                    raise self.outage(place, error.args[0]) from error
            stop.wait(_PAUSE_SECONDS)

    def _wait_until_ended(self, partition: TopicPartition, stop: threading.Event, deadline: float) -> None:
        """Return when every transaction of the partition is committed or aborted."""
        while True:
            end = self._end(partition, IsolationLevel.READ_UNCOMMITTED)
            if self._end(partition, IsolationLevel.READ_COMMITTED) >= end:
                return
            if stop.is_set() or time.monotonic() > deadline:
                raise self._unread(partition.topic)
            stop.wait(_PAUSE_SECONDS)

    def _end(self, partition: TopicPartition, level: IsolationLevel) -> int:
        answers = self._topics.admin.list_offsets(
            {partition: kafka_admin.OffsetSpec.latest()}, isolation_level=level, request_timeout=ASK_SECONDS
        )
        (answer,) = answers.values()
        return int(answer.result().offset)

    def _last(self, partition: TopicPartition, end: int, stop: threading.Event, deadline: float) -> bytes:
        places = _LAST_PLACES
        consumer = Consumer(self._config)
        try:
            while True:
                start = max(0, end - places)
                consumer.assign([TopicPartition(partition.topic, partition.partition, start)])
                value = self._read_to(consumer, end, stop, deadline)
                if value or start == 0:
                    return value
                places *= _FURTHER
        finally:
            consumer.close()

    def _read_to(self, consumer: Any, end: int, stop: threading.Event, deadline: float) -> bytes:
        """The last committed ticket before ``end``. Waits until everything before it is committed or aborted."""
        value = b""
        while not stop.is_set():
            message = consumer.poll(_TICK_SECONDS)
            if message is None:
                if time.monotonic() > deadline:
                    break
            elif message.error() is not None:
                raise KafkaException(message.error())
            elif message.offset() >= end:
                return value
            else:
                value = self._ticket(message) if message.value() else value
        raise self._unread(consumer.assignment()[0].topic)

    def _unread(self, topic: str) -> Outage:
        return Outage(
            f"{self._description}: the progress topic {topic!r} cannot be read to its end; another relay has a "
            "transaction open there, or the cluster is busy; if this lasts, see the runbook: Exactly once into Kafka"
        )

    def outage(self, place: Place, reason: Any) -> Outage:
        """The outage for an error of Kafka. The topic is checked again before its next use."""
        self.forget(place)
        if reason.code() in _DENIED:
            return Outage(
                f"{self._description} does not let this client use the progress topic {progress_topic(place)!r} "
                f"({reason.str()}); run, with your principal: {commands(place)}"
            )
        if reason.code() == KafkaError.INVALID_REPLICATION_FACTOR:
            return Outage(
                f"{self._description} cannot make the progress topic {progress_topic(place)!r} ({reason.str()}); "
                f"run: {commands(place)}"
            )
        return Outage(f"{self._description}: the progress topic {progress_topic(place)!r}: {reason.str()}")
