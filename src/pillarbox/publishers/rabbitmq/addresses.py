"""What the server said about exchanges and queues: whether they are there, and the largest body that it takes."""

import time
from collections.abc import Collection
from typing import Final, NamedTuple

from pillarbox.amqp import AmqpConnection, is_name
from pillarbox.publisher import Outcome, outage, retry
from pillarbox.publishers._link import Link

REFRESH_SECONDS: Final = 300.0
# The wait of an event whose address is missing: as long as it has been missing, within these bounds.
WAIT_SECONDS: Final = (1.0, 30.0)
MOST_NAMES: Final = 10_000

NO_TOPIC: Final = (
    "the event has no topic, and exchange='*' gives it none; give events a topic, or the publisher a default exchange"
)


class _Problem(NamedTuple):
    """by_message: a message was refused, so only a message can tell that this has ended."""

    reason: str
    since: float
    until: float
    by_message: bool


class Addresses:
    """Shared by all connections of a publisher. An address is an event's ``topic``; empty: the default. Of an exchange
    that may be written, single routing keys may be refused."""

    def __init__(self, exchange: str, queue: str, max_bytes: int, waiting: Link) -> None:
        self.exchange = exchange
        self.queue = queue
        self._max_bytes = max_bytes
        self._learnt_bytes, self._learnt_until = max_bytes, 0.0
        self._waiting = waiting
        self._fresh_until: dict[str, float] = {}
        self._problems: dict[str, _Problem] = {}
        self._keys: dict[tuple[str, str], _Problem] = {}  # by address and routing key

    @property
    def max_bytes(self) -> int:
        """The largest body: as it was set, or as the server said lately. Somebody can raise the server's limit."""
        return self._learnt_bytes if time.monotonic() < self._learnt_until else self._max_bytes

    def learn_max_bytes(self, max_bytes: int) -> None:
        self._learnt_bytes = min(max_bytes, self._max_bytes)
        self._learnt_until = time.monotonic() + REFRESH_SECONDS

    async def look_up(self, link: AmqpConnection, topics: Collection[str]) -> None:
        """Ask the server about those that were not asked about lately."""
        now = time.monotonic()
        for topic in topics:
            if self._fresh_until.get(topic, 0.0) > now:
                continue
            exchange = topic or self.exchange
            # Events without an address wait, and those with an impossible one are rejected.
            if not is_name(exchange) or not (exchange or self.queue):
                continue
            reason = await link.missing(exchange=exchange, queue=self.queue)
            if reason is not None:
                self.refused(topic, reason, by_message=False)
                continue
            problem = self._problems.get(topic)
            if problem is not None and not problem.by_message:
                del self._problems[topic]
            self._remember(topic, REFRESH_SECONDS)

    def refused(self, topic: str, reason: str, *, by_message: bool = True) -> None:
        """Messages for this address are refused: it is asked about again after a wait."""
        now = time.monotonic()
        before = self._problems.get(topic)
        since = now if before is None else before.since
        until = now + self._wait_seconds(now - since)
        self._remember(topic, until - now)
        self._problems[topic] = _Problem(reason, since, until, by_message)

    def refused_key(self, topic: str, routing_key: str, reason: str) -> None:
        """Messages with this routing key are refused, because a topic permission leaves it out."""
        now = time.monotonic()
        since = self._key_since(topic, routing_key, now)
        self._keys[topic, routing_key] = _Problem(reason, since, now + self._wait_seconds(now - since), True)

    def forget(self, topic: str) -> None:
        """Ask again at the next use."""
        self._fresh_until.pop(topic, None)

    def accepted(self, topic: str, routing_key: str) -> None:
        """A message for this address was confirmed."""
        if self._problems:
            self._problems.pop(topic, None)
        if self._keys:
            self._keys.pop((topic, routing_key), None)

    def problem(self, topic: str) -> Outcome | None:
        """The outcome of an event for this address; None: it can be sent."""
        if not topic and not self.exchange and not self.queue:
            self._waiting.waits("", NO_TOPIC)
            return retry(NO_TOPIC, charged=False, after_seconds=WAIT_SECONDS[1])
        problem = self._problems.get(topic)
        # When the time is up, one more message tells whether a permission was given. For an exchange that is missing it
        # would close the connection: ``look_up`` asks about that, before the next call sends anything.
        if problem is None or (problem.by_message and problem.until <= time.monotonic()):
            return None
        return self._outcome(topic, problem)

    def key_problem(self, topic: str, routing_key: str) -> Outcome | None:
        """The outcome of an event with this routing key; None: it can be sent."""
        problem = self._keys.get((topic, routing_key)) if self._keys else None
        if problem is None or problem.until <= time.monotonic():
            return None
        sentence = (
            f"exchange {topic or self.exchange!r} on {self._waiting.description} takes no routing key "
            f"{routing_key!r} from this user: {problem.reason}; give the user a topic permission for it"
        )
        self._waiting.waits(f"{topic or self.exchange} {routing_key}", sentence)
        # As for a routing key without a queue.
        seconds = self._wait_seconds(time.monotonic() - problem.since)
        return retry(sentence, charged=False, after_seconds=seconds, ambiguous=True)

    def unroutable(self, topic: str, routing_key: str) -> Outcome:
        """The outcome of an event that no queue took."""
        if not topic and self.queue:
            self.forget("")
            return outage(f"queue {self.queue!r} on {self._waiting.description} does not exist; create it")
        now = time.monotonic()
        since = self._key_since(topic, routing_key, now)
        # To send it again harms nobody, so nothing keeps another event from trying.
        self._keys[topic, routing_key] = _Problem("", since, now, True)
        exchange = topic or self.exchange
        sentence = (
            f"exchange {exchange!r} on {self._waiting.description} has no queue for routing key {routing_key!r}; "
            "bind a queue"
        )
        self._waiting.waits(f"{exchange} {routing_key}", sentence)
        # Someone can bind a queue, so the event is not to blame. If nothing has a queue, the exchange is.
        return retry(sentence, charged=False, after_seconds=self._wait_seconds(now - since), ambiguous=True)

    def _outcome(self, topic: str, problem: _Problem) -> Outcome:
        name = f"exchange {topic or self.exchange!r}" if topic or self.exchange else f"queue {self.queue!r}"
        sentence = (
            f"{name} on {self._waiting.description} cannot be used: {problem.reason}; create it, or give this user "
            "permission to write"
        )
        # Without the default address nothing goes on.
        if not topic:
            return outage(sentence)
        self._waiting.waits(topic, sentence)
        return retry(sentence, charged=False, after_seconds=self._wait_seconds(time.monotonic() - problem.since))

    def _key_since(self, topic: str, routing_key: str, now: float) -> float:
        """Since when a routing key has its problem."""
        before = self._keys.get((topic, routing_key))
        if before is None and len(self._keys) >= MOST_NAMES:  # they come from events too
            self._keys.clear()
        return now if before is None else before.since

    def _wait_seconds(self, missing_seconds: float) -> float:
        shortest, longest = WAIT_SECONDS
        return min(longest, max(shortest, missing_seconds))

    def _remember(self, topic: str, seconds: float) -> None:
        if len(self._fresh_until) >= MOST_NAMES:  # names come from events, so there can be any number of them
            self._fresh_until.clear()
            self._problems.clear()
        self._fresh_until[topic] = time.monotonic() + seconds
