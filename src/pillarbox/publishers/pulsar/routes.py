"""The producers of one connection: one per partition, because a key's partition is chosen here."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import pulsar

from pillarbox.publishers.pulsar.hashing import HASHES
from pillarbox.pulsar.client import new_client, new_producer
from pillarbox.pulsar.settings import Login

logger = logging.getLogger("pillarbox.publishers.pulsar")

ASK_AGAIN_SECONDS: Final = 60.0


class Partitions:
    """The partitions of topics, asked for once a minute. Shared by all connections, so that they agree on a key."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._known: dict[str, tuple[float, Sequence[str]]] = {}
        self._lock = threading.Lock()

    def get(self, topic: str, ask: Callable[[str], Sequence[str]]) -> Sequence[str]:
        """The full names of the topic's partitions. Raises what ``ask`` raises for a topic that is not known yet."""
        until, names = self._known.get(topic, (0.0, ()))
        if time.monotonic() < until:
            return names
        with self._lock:
            until, names = self._known.get(topic, (0.0, ()))
            if time.monotonic() < until:
                return names
            try:
                found = ask(topic)
            except pulsar.PulsarException:
                if not names:
                    raise
                # Old partitions are better than a stop: the producers wait for the cluster by themselves.
                found = names
            if names and len(found) != len(names):
                logger.warning(
                    "topic %r on %s has %d partitions in place of %d: keys move to other partitions, where their later "
                    "events can be read before the earlier ones",
                    topic,
                    self._description,
                    len(found),
                    len(names),
                    extra={"action": "partitions_changed", "destination": self._description, "topic": topic},
                )
            self._known[topic] = time.monotonic() + ASK_AGAIN_SECONDS, found
            return found

    def forget(self, topic: str) -> None:
        """Ask again at the next use."""
        self._known.pop(topic, None)


class Settings(NamedTuple):
    """Settings that all connections of a publisher share."""

    login: Login
    timeout_seconds: float
    batching: str
    compression: str
    hash: str
    max_message_bytes: int


class Route:
    """The producers of one topic: for each partition one that makes batches, and one for large messages."""

    def __init__(self, producers: Sequence[Any], hash_: Callable[[str], int], make_lone: Callable[[int], Any]) -> None:
        self.producers = producers
        self._hash = hash_
        self._make_lone = make_lone
        self._lone: dict[int, Any] = {}
        self._next = 0

    def turn(self) -> None:
        """Send the next wave's events without a key to the next partition: one batch of many is cheaper."""
        self._next = (self._next + 1) % len(self.producers)

    def choose(self, key: str | None) -> Any:
        """The producer for this key."""
        return self.producers[self.partition(key)]

    def choose_lone(self, key: str | None) -> Any:
        """The producer for a large message of this key. Raises what the client raises."""
        partition = self.partition(key)
        if partition not in self._lone:
            self._lone[partition] = self._make_lone(partition)
        return self._lone[partition]

    def partition(self, key: str | None) -> int:
        """The number of the partition of this key."""
        return self._next if key is None else self._hash(key) % len(self.producers)


class Connection:
    """A client and its producers, made when they are needed. After ``drop`` a new client is used."""

    def __init__(self, settings: Settings, partitions: Partitions) -> None:
        self._settings = settings
        self._partitions = partitions
        self._client: Any = None
        self._routes: dict[str, Route] = {}
        self.answered_at = 0.0  # when a broker last told the partitions of a topic

    def route(self, topic: str) -> Route:
        """The producers of a topic. Raises what the client raises."""
        if self._client is None:
            self._client = new_client(self._settings.login, self._settings.timeout_seconds)
        names = self._partitions.get(topic, self._ask_partitions)
        route = self._routes.get(topic)
        if route is None or len(route.producers) != len(names):
            made = route.producers if route is not None else []
            producers = [*made[: len(names)], *(self._producer(name) for name in names[len(made) :])]
            self._routes[topic] = route = Route(
                producers, HASHES[self._settings.hash], lambda partition: self._producer(names[partition], batching="")
            )
        return route

    def _ask_partitions(self, topic: str) -> Sequence[str]:
        found: Sequence[str] = self._client.get_topic_partitions(topic)
        self.answered_at = time.monotonic()
        return found

    def _producer(self, partition: str, batching: str | None = None) -> Any:
        settings = self._settings
        return new_producer(
            self._client,
            partition,
            batching=settings.batching if batching is None else batching,
            compression=settings.compression,
            max_message_bytes=settings.max_message_bytes,
        )

    def ask(self, topic: str) -> None:
        """Ask with a client of its own whether the topic can be written. Raises what that client raises."""
        other = Connection(self._settings, Partitions(""))
        try:
            other.route(topic)
        finally:
            other.drop()

    def drop(self) -> None:
        """End the client, which takes as long as one question while the cluster is away.

        Its messages without an answer are reported as not sent, though some of them may be stored.
        """
        client, self._client = self._client, None
        for topic in self._routes:
            self._partitions.forget(topic)
        self._routes.clear()
        if client is not None:
            # Its `shutdown` returns sooner, but can hold the interpreter's lock for ten seconds.
            with suppress(pulsar.PulsarException):
                client.close()
