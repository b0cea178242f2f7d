"""Facts about topics that the cluster tells: whether they exist, their size limit, whether they are compacted."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka import admin as confluent_admin

from pillarbox.envelopes import Message
from pillarbox.kafka.errors import config_error
from pillarbox.threads import Thread

# The library's types lack some exports and the callbacks of its configuration.
kafka_admin: Any = confluent_admin

logger = logging.getLogger("pillarbox.publishers.kafka")

REFRESH_SECONDS: Final = 300.0
# The pause between two questions about a topic that cannot be written: as long again as it has been so.
MISSING_SECONDS: Final = (1.0, 5.0)
ASK_SECONDS: Final = 1.0
DESCRIBE_SECONDS: Final = 5.0

_BATCH_OVERHEAD: Final = 61
_NOT_YET: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE)
_AWAY: Final = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)


class UnreachableError(Exception):
    """The cluster did not answer."""


class Problem(NamedTuple):
    """Why nothing can be written to a topic, and what to do.

    seconds: how long this has been known. is_final: no topic can ever have this name.
    """

    sentence: str
    seconds: float = 0.0
    is_final: bool = False


class Topic(NamedTuple):
    """A topic's rules."""

    name: str
    max_bytes: int = 1_000_000
    compacted: bool = False
    problem: Problem | None = None


class Topics:
    """Asks once per topic and again every five minutes. Blocking; safe to share between threads.

    One question is about all topics that a call needs to know, so that missing ones do not delay the others.
    """

    def __init__(self, config: Mapping[str, Any], description: str, refresh_seconds: float = REFRESH_SECONDS) -> None:
        self._description = description
        self._refresh_seconds = refresh_seconds
        self._known: dict[str, Topic] = {}
        self._fresh_until: dict[str, float] = {}
        self._problem_since: dict[str, float] = {}
        self._warned = False
        self._lock = threading.Lock()
        self._background: Thread | None = None
        self._is_closed = False
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

    @property
    def admin(self) -> Any:
        """The client for questions to the cluster."""
        return self._admin

    def reachable(self) -> bool:
        try:
            self.connect(ASK_SECONDS)
        except UnreachableError:
            return False
        return True

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._background is not None:
                self._background.stop()
                self._background = None

    @property
    def sizes(self) -> tuple[int, int]:
        """The smallest and the largest limit of the topics met so far."""
        limits = [topic.max_bytes for topic in list(self._known.values()) if topic.problem is None]
        return (min(limits), max(limits)) if limits else (Topic("").max_bytes, Topic("").max_bytes)

    def get(self, names: Iterable[str]) -> dict[str, Topic]:
        """The topics by name. Raises UnreachableError when an unknown one cannot be asked about."""
        wanted = list(names)
        if self._stale(wanted):
            with self._lock:
                if stale := self._stale(wanted):
                    self._ask(stale)
        return {name: self._known[name] for name in wanted}

    def forget(self, name: str) -> None:
        """Ask again at the next use: the topic was changed or deleted."""
        self._fresh_until.pop(name, None)

    def _stale(self, names: Iterable[str]) -> list[str]:
        now = time.monotonic()
        return [name for name in names if self._fresh_until.get(name, 0) <= now]

    def _ask(self, names: Sequence[str]) -> None:
        shortest, longest = MISSING_SECONDS
        try:
            errors = self._errors(names)
            rules = self._rules([name for name in names if errors[name] is None])
        except UnreachableError:
            if any(name not in self._known for name in names):
                raise
            # Old rules are better than a stop: the producer waits for the cluster by itself.
            self._fresh_until.update(dict.fromkeys(names, time.monotonic() + longest))
            return
        now = time.monotonic()
        for name, error in errors.items():
            if error is None:
                self._problem_since.pop(name, None)
                self._known[name] = rules[name]
                self._fresh_until[name] = now + self._refresh_seconds
                continue
            seconds = now - self._problem_since.setdefault(name, now)
            self._known[name] = Topic(name, problem=topic_problem(name, self._description, error, seconds))
            self._fresh_until[name] = now + min(longest, max(shortest, seconds))
            if error.code() in _NOT_YET:
                self._have_it_made(name)

    def _errors(self, names: Sequence[str]) -> dict[str, Any]:
        """The error of each topic; None: it can be written."""
        answers = self._admin.describe_topics(TopicCollection(list(names)), request_timeout=ASK_SECONDS)
        errors: dict[str, Any] = {}
        for name, answer in answers.items():
            try:
                answer.result()
                errors[name] = None
            except KafkaException as failure:
                if failure.args[0].code() in _AWAY:
                    raise UnreachableError(failure.args[0].str()) from failure
                errors[name] = failure.args[0]
        return errors

    def _have_it_made(self, name: str) -> None:
        """Ask for the topic by name, because some clusters then make it. In the background: each takes a while."""

        def ask() -> None:
            with suppress(KafkaException):
                if not self._is_closed:
                    self._admin.list_topics(topic=name, timeout=ASK_SECONDS)

        if self._background is None:
            self._background = Thread("pillarbox-kafka-topics")
        self._background.submit(ask)

    def _rules(self, names: Sequence[str]) -> dict[str, Topic]:
        """The rules of topics that exist."""
        if not names:
            return {}
        resources = [kafka_admin.ConfigResource(kafka_admin.ResourceType.TOPIC, name) for name in names]
        answers = self._admin.describe_configs(resources, request_timeout=DESCRIBE_SECONDS)
        return {resource.name: self._rules_of(resource.name, answer) for resource, answer in answers.items()}

    def _rules_of(self, name: str, answer: Any) -> Topic:
        try:
            entries = answer.result()
            return Topic(name, int(entries["max.message.bytes"].value), "compact" in entries["cleanup.policy"].value)
        except KafkaException as error:
            if error.args[0].code() in _AWAY:
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


def topic_problem(name: str, description: str, error: Any, seconds: float = 0.0) -> Problem:
    """An error that the cluster gave about a topic, and that has been known for so many seconds."""
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        sentence = f"topic {name!r} on {description} may not be written; allow this client to write and describe it"
        return Problem(sentence, seconds)
    if error.code() == KafkaError.TOPIC_EXCEPTION:
        sentence = f"topic {name!r} is not a name that {description} takes; use letters, digits, '.', '_' and '-'"
        return Problem(sentence, seconds, is_final=True)
    return Problem(f"topic {name!r} does not exist on {description}; create it", seconds)


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
