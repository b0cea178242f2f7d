"""Facts about topics that the cluster tells: whether they exist, their size limit, whether they are compacted."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import admin as confluent_admin

from pillarbox.envelopes import Message
from pillarbox.errors import ConfigError

# The library's types lack some exports and the callbacks of its configuration.
kafka_admin: Any = confluent_admin

logger = logging.getLogger("pillarbox.publishers.kafka")

REFRESH_SECONDS: Final = 300.0
# A topic made a moment ago, or by this very question, is not known to every broker at once.
APPEAR_SECONDS: Final = 2.0
ASK_SECONDS: Final = 1.0
DESCRIBE_SECONDS: Final = 5.0

_BATCH_OVERHEAD: Final = 61
_NOT_YET: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE)


class UnreachableError(Exception):
    """The cluster did not answer."""


class Topic(NamedTuple):
    """A topic's rules; ``problem`` says why nothing can be written to it and what to do."""

    name: str
    max_bytes: int = 1_000_000
    compacted: bool = False
    problem: str | None = None


class Topics:
    """Asks once per topic and again every five minutes. Blocking; safe to share between threads."""

    def __init__(self, config: Mapping[str, Any], description: str, refresh_seconds: float = REFRESH_SECONDS) -> None:
        self._description = description
        self._refresh_seconds = refresh_seconds
        self._known: dict[str, Topic] = {}
        self._fresh_until: dict[str, float] = {}
        self._missing: set[str] = set()
        self._warned = False
        self._lock = threading.Lock()
        self.last_error: str | None = None
        try:
            self._admin: Any = kafka_admin.AdminClient({**config, "error_cb": self._note})
        except (KafkaException, TypeError, ValueError) as error:
            raise config_error(error) from error

    def _note(self, error: Any) -> None:
        if self.last_error is None or error.code() == KafkaError._AUTHENTICATION:
            self.last_error = error.str()

    def connect(self, seconds: float) -> None:
        """Raises UnreachableError when no broker answers in time."""
        self.last_error = None
        try:
            self._admin.list_topics(timeout=seconds)
        except KafkaException as error:
            self._admin.poll(0)
            raise UnreachableError(self._reason(error)) from error

    def _reason(self, error: KafkaException) -> str:
        return self.last_error or str(error.args[0].str())

    def reachable(self) -> bool:
        try:
            self.connect(ASK_SECONDS)
        except UnreachableError:
            return False
        return True

    @property
    def sizes(self) -> tuple[int, int]:
        """The smallest and the largest limit of the topics met so far."""
        limits = [topic.max_bytes for topic in self._known.values()] or [Topic("").max_bytes]
        return min(limits), max(limits)

    def get(self, names: Iterable[str], stopped: Callable[[], bool]) -> dict[str, Topic]:
        """The topics by name. Raises UnreachableError when an unknown one cannot be asked about."""
        now = time.monotonic()
        wanted = list(names)
        if all(self._fresh_until.get(name, 0) > now for name in wanted):
            return {name: self._known[name] for name in wanted}
        with self._lock:
            return {name: self._one(name, stopped) for name in wanted}

    def forget(self, name: str) -> None:
        """Ask again at the next use: the topic was changed or deleted."""
        self._fresh_until.pop(name, None)

    def _one(self, name: str, stopped: Callable[[], bool]) -> Topic:
        if self._fresh_until.get(name, 0) > time.monotonic():
            return self._known[name]
        try:
            if problem := self._problem(name, stopped):
                self._known.pop(name, None)
                self._fresh_until.pop(name, None)
                return Topic(name, problem=problem)
            topic = self._describe(name)
        except UnreachableError:
            if name not in self._known:
                raise
            # Old rules are better than a stop: the producer waits for the cluster by itself.
            topic = self._known[name]
        self._known[name] = topic
        self._fresh_until[name] = time.monotonic() + self._refresh_seconds
        return topic

    def _problem(self, name: str, stopped: Callable[[], bool]) -> str | None:
        until = time.monotonic() + (0 if name in self._missing else APPEAR_SECONDS)
        while True:
            try:
                error = self._admin.list_topics(topic=name, timeout=ASK_SECONDS).topics[name].error
            except KafkaException as failure:
                raise UnreachableError(failure.args[0].str()) from failure
            if error is None:
                self._missing.discard(name)
                return None
            if error.code() not in _NOT_YET:
                return topic_problem(name, self._description, error)
            if time.monotonic() >= until or stopped():
                self._missing.add(name)
                return topic_problem(name, self._description, error)
            time.sleep(0.1)

    def _describe(self, name: str) -> Topic:
        resource = kafka_admin.ConfigResource(kafka_admin.ResourceType.TOPIC, name)
        try:
            (answer,) = self._admin.describe_configs([resource], request_timeout=DESCRIBE_SECONDS).values()
            entries = answer.result()
            return Topic(name, int(entries["max.message.bytes"].value), "compact" in entries["cleanup.policy"].value)
        except KafkaException as error:
            if error.args[0].code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT):
                raise UnreachableError(error.args[0].str()) from error
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s does not tell the limits of topic %s (%s): %d bytes are assumed; "
                    "allow DescribeConfigs on its topics to have the real ones used",
                    self._description,
                    name,
                    error.args[0].str(),
                    Topic("").max_bytes,
                    extra={"action": "kafka_limits_unknown", "destination": self._description, "topic": name},
                )
            return Topic(name)


def topic_problem(name: str, description: str, error: Any) -> str:
    """A sentence for an error that the cluster gave about a topic."""
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return f"topic {name!r} on {description} may not be written; allow this client to write and describe it"
    if error.code() == KafkaError.TOPIC_EXCEPTION:
        return f"topic {name!r} is not a name that {description} takes; use letters, digits, '.', '_' and '-'"
    return f"topic {name!r} does not exist on {description}; create it"


def config_error(error: Exception) -> ConfigError:
    """The error for properties that the client library refuses."""
    reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
    return ConfigError(f"the Kafka client refuses its properties: {reason}; correct or remove it")


def lone_batch_bytes(message: Message) -> int:
    """The exact size of a record batch with this message alone, which is what a topic's limit applies to."""
    size = 3  # attributes, and the zero deltas of timestamp and offset
    for part in (message.key, message.value):
        size += 1 if part is None else _varint(len(part)) + len(part)
    size += _varint(len(message.headers))
    for name, value in message.headers:
        length = len(name.encode())
        size += _varint(length) + length + _varint(len(value)) + len(value)
    return _BATCH_OVERHEAD + _varint(size) + size


def _varint(number: int) -> int:
    # Zigzag doubles the number before it is cut into groups of seven bits.
    return max(1, (2 * number).bit_length() + 6) // 7 if number else 1
