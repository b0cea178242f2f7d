"""Sends a batch to Kafka in waves, so that every key keeps its order. Blocking."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from pillarbox.envelopes import Message
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome
from pillarbox.publishers._link import Link
from pillarbox.publishers._waves import Runs
from pillarbox.publishers.kafka.call import Call
from pillarbox.publishers.kafka.client import Client
from pillarbox.publishers.kafka.outcomes import (
    ACCESS_ERRORS,
    PURGED,
    REFUSED_WITH_ITS_BATCH,
    Outcomes,
)
from pillarbox.publishers.kafka.targets import QUIET_SECONDS, TICK_SECONDS, Targets, sized
from pillarbox.publishers.kafka.topics import ASK_SECONDS, Topics

logger = logging.getLogger("pillarbox.publishers.kafka")

# Most messages in flight at a close are confirmed within this time, and then need no copy.
GRACE_SECONDS: Final = 1.0
MAX_REPLACEMENTS: Final = 3


class Ending(Enum):
    """The end of the wait for a wave."""

    ANSWERED = auto()
    STOPPED = auto()
    STUCK = auto()
    NO_ACCESS = auto()


class Sender:
    """One producer, used by one call at a time in its own thread."""

    def __init__(
        self,
        *,
        config: Mapping[str, Any],
        topics: Topics,
        link: Link,
        message_of: Callable[[Event], Message],
        default_topic: str,
        strict_keys: bool,
        stuck_seconds: float,
    ) -> None:
        self._config = config
        self._topics = topics
        self._link = link
        self._outcomes = Outcomes(link.description, default_topic)
        self._message_of = message_of
        self._default_topic = default_topic
        self._strict_keys = strict_keys
        self._stuck_seconds = stuck_seconds
        self._targets = Targets(topics, link, self._outcomes, default_topic, config)
        self.stop = threading.Event()
        self._client: Client | None = None
        self._lone_client: Client | None = None
        self._ready_client()

    def connect(self) -> None:
        """Look up the partitions of the default topic and their brokers now, not with the first event."""
        with suppress(KafkaException):
            self._ready_client().producer.list_topics(self._default_topic, timeout=ASK_SECONDS)

    def close(self) -> None:
        self._client = self._lone_client = None

    def deliver(self, events: Sequence[Event]) -> list[Outcome]:
        """One outcome per event. Returns when all are known, or soon after ``stop`` is set."""
        try:
            targets = self._targets.of(events, self.stop)
            return self._deliver(Call(events, targets)) if targets else [UNTRIED] * len(events)
        except BaseException:
            self.close()
            raise

    def _deliver(self, call: Call) -> list[Outcome]:
        count = len(call.events)
        todo: Sequence[int] = range(count)
        replacements = 0
        while todo and not self.stop.is_set():
            client = self._ready_client()
            sent, later = self._produce(call, client, todo)
            ending = self._wait(call, client) if sent else Ending.ANSWERED
            if len(sent) == count and client.confirmed.count(1) == count:
                return [PUBLISHED] * count
            again = self._record_wave(call, client, sent, ending)
            todo = sorted(again + later)
            if ending is not Ending.ANSWERED:
                # Purged messages leave a gap in the sequence: this producer cannot go on.
                self._client = None
                break
            if client.fatal is not None:
                self._client = None
                replacements = replacements + 1 if again == sent else 0
                if replacements >= MAX_REPLACEMENTS or client.fatal.code() in ACCESS_ERRORS:
                    for index in todo:
                        call.record(index, self._outcomes.producer_failed(client.fatal))
                    return call.outcomes
        for index in todo:
            call.record(index, UNTRIED)
        return call.outcomes

    def _ready_client(self) -> Client:
        if self._client is None or self._client.sizes != self._topics.sizes:
            self._client = self._new_client(gapless=True)
        return self._client

    def _new_client(self, *, gapless: bool) -> Client:
        sizes = self._topics.sizes
        config = sized({**self._config, "enable.gapless.guarantee": gapless}, sizes)
        return Client(config, sizes)

    def _produce(self, call: Call, client: Client, todo: Sequence[int]) -> tuple[list[int], list[int]]:
        """Queue the events that may go now. Returns the indexes of those, and of those for the next wave."""
        sent: list[int] = []
        later: list[int] = []
        events, targets, stops = call.events, call.targets, call.stops
        reporters, message_of, produce = client.begin(len(events)), self._message_of, client.produce
        runs = Runs(strict=self._strict_keys) if self._strict_keys or len(targets) > 1 else None
        is_full = False
        # Unpacked once per change of topic: a lookup per event would be slow.
        written_topic = events[0].topic
        target = targets[written_topic]
        topic, topic_refusal, compacted, _, roomy_bytes = target
        if runs is None and not stops and topic_refusal is None and not compacted and isinstance(todo, range):
            sent = list(range(self._produce_plain(events, topic, roomy_bytes, client, reporters)))
            todo = todo[len(sent) :]
        for index in todo:
            event = events[index]
            if event.topic != written_topic:
                written_topic = event.topic
                target = targets[written_topic]
                topic, topic_refusal, compacted, _, roomy_bytes = target
            if stops and call.is_behind_a_stop(index):
                continue
            if is_full or (runs is not None and runs.must_wait(event.key, topic)):
                later.append(index)
                continue
            refusal = topic_refusal
            if refusal is None:
                try:
                    message = message_of(event)
                    key, value, headers = message
                    if (compacted and key is None) or (value is not None and len(value) > roomy_bytes):
                        refusal = target.refuse(message)
                    if refusal is None:
                        produce(topic, value, key, -1, reporters[index], headers=headers)
                        sent.append(index)
                        continue
                except BufferError:
                    is_full = True
                except KafkaException as error:
                    if error.args[0].fatal() or error.args[0].code() == KafkaError._FATAL:
                        client.fatal = client.fatal or error.args[0]
                        is_full = True
                    else:
                        refusal = self._outcomes.classify(event, error.args[0])
                except Exception as error:
                    refusal = self._outcomes.envelope(event, error)
            if refusal is None:
                later.append(index)
            else:
                call.record(index, refusal)
        return sent, later

    def _produce_plain(
        self, events: Sequence[Event], topic: str, roomy_bytes: int, client: Client, reporters: Sequence[Any]
    ) -> int:
        """Queue events of one topic until one fails or is large; returns how many. The general loop goes on with that
        one and meets the same problem."""
        message_of, produce = self._message_of, client.produce
        queued = 0
        try:
            for event, reporter in zip(events, reporters, strict=False):
                key, value, headers = message_of(event)
                if value is not None and len(value) > roomy_bytes:
                    break
                produce(topic, value, key, -1, reporter, headers=headers)
                queued += 1
        except Exception as error:
            logger.debug("event %s was not queued: %s", events[queued].id, type(error).__name__)
        return queued

    def _wait(self, call: Call, client: Client) -> Ending:
        """Return when every queued message has its report. During an outage this waits for its end."""
        progress_at = time.monotonic()
        stop_at: float | None = None
        confirmed = 0
        while client.flush(TICK_SECONDS):
            now = time.monotonic()
            if client.fatal is not None:
                # Messages in flight still get their true answer; the others were never written.
                client.purge(in_flight=False)
            if self.stop.is_set():
                stop_at = stop_at or now + GRACE_SECONDS
                if now >= stop_at:
                    return self._abandon(client, Ending.STOPPED)
            if (seen := client.confirmed.count(1)) > confirmed:
                confirmed, progress_at = seen, now
                self._link.confirmed()
                continue
            if client.login_error and not confirmed:
                return self._abandon(client, Ending.NO_ACCESS)
            quiet_seconds = now - progress_at
            if quiet_seconds < min(QUIET_SECONDS, self._stuck_seconds):
                continue
            if quiet_seconds >= QUIET_SECONDS:
                self._link.silent(quiet_seconds, client.last_error)
            if quiet_seconds >= self._stuck_seconds and (confirmed or call.any_confirmed):
                if self._topics.reachable():
                    return self._abandon(client, Ending.STUCK)
                # Everything is away, not only some partitions: ask again after the same time.
                progress_at = now
        if client.fatal is None:
            self._link.confirmed()
        return Ending.ANSWERED

    def _abandon(self, client: Client, ending: Ending) -> Ending:
        client.purge(in_flight=True)
        until = time.monotonic() + GRACE_SECONDS
        while client.flush(TICK_SECONDS) and time.monotonic() < until:
            pass
        return ending

    def _record_wave(self, call: Call, client: Client, sent: Sequence[int], ending: Ending) -> list[int]:
        """Record the known outcomes. Returns the indexes of the events to send again."""
        again: list[int] = []
        refused: list[int] = []
        for index in sent:
            if client.confirmed[index]:
                call.confirm(index)
                continue
            error = client.errors.get(index)
            code = None if error is None else error.code()
            if code is not None and code not in PURGED:
                self._topics.forget(call.targets[call.events[index].topic].topic)
            if ending is Ending.STOPPED:
                call.record(index, UNTRIED)
            elif code in REFUSED_WITH_ITS_BATCH:
                refused.append(index)
            elif code is not None and code not in PURGED:
                call.record(index, self._outcomes.classify(call.events[index], error))
            elif ending is Ending.NO_ACCESS:
                call.record(index, self._outcomes.no_access(client.login_error))
            elif ending is Ending.STUCK:
                call.record(index, self._outcomes.stuck(self._stuck_seconds))
            elif client.fatal is not None:
                again.append(index)
            else:
                call.record(index, self._outcomes.unreported())
        if len(refused) == 1:
            # A refused batch is reported for each of its records, so this one was alone.
            call.record(refused[0], self._outcomes.classify(call.events[refused[0]], client.errors[refused[0]]))
        else:
            for index in refused:
                self._send_alone(call, index)
        return again

    def _send_alone(self, call: Call, index: int) -> None:
        if call.is_behind_a_stop(index) or self.stop.is_set():
            call.record(index, UNTRIED)
            return
        event = call.events[index]
        if self._lone_client is None:
            # With one message at a time nothing can overtake it, and a refusal need not end the producer.
            self._lone_client = self._new_client(gapless=False)
        client = self._lone_client
        (reporter, *_) = client.begin(1)
        try:
            message = self._message_of(event)
            topic = call.targets[event.topic].topic
            client.produce(topic, message.value, message.key, -1, reporter, headers=message.headers)
        except KafkaException as error:
            call.record(index, self._outcomes.classify(event, error.args[0]))
            return
        except Exception as error:
            call.record(index, self._outcomes.envelope(event, error))
            return
        ending = self._wait(call, client)
        if ending is not Ending.ANSWERED or client.fatal is not None:
            self._lone_client = None
        if client.confirmed[0]:
            call.confirm(index)
        elif ending is Ending.STOPPED:
            call.record(index, UNTRIED)
        elif ending is Ending.NO_ACCESS:
            call.record(index, self._outcomes.no_access(client.login_error))
        elif ending is Ending.STUCK or 0 not in client.errors:
            call.record(index, self._outcomes.stuck(self._stuck_seconds))
        else:
            call.record(index, self._outcomes.classify(event, client.errors[0]))
