"""The transactional producer of one shard: it publishes a part with its ticket, all of it or nothing. Blocking."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from pillarbox.batch import Part
from pillarbox.envelopes import Message
from pillarbox.errors import ConfigError, Outage
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Place, outage, retry
from pillarbox.publishers._link import Link
from pillarbox.publishers.kafka.call import Call
from pillarbox.publishers.kafka.client import Client
from pillarbox.publishers.kafka.coordinator import transaction_problem
from pillarbox.publishers.kafka.outcomes import (
    ACCESS_ERRORS,
    PURGED,
    REFUSED_WITH_ITS_BATCH,
    TOPIC_ERRORS,
    Outcomes,
)
from pillarbox.publishers.kafka.progress import (
    TICKET_BYTES,
    ProgressTopics,
    commands,
    end_key,
    progress_topic,
    transactional_id,
)
from pillarbox.publishers.kafka.targets import TICK_SECONDS, Targets, sized
from pillarbox.publishers.kafka.topics import Topics, lone_batch_bytes

logger = logging.getLogger("pillarbox.publishers.kafka")

_INIT_SECONDS: Final = 10.0
_ABORT_SECONDS: Final = 1.0
# When one record was refused, the answers about its neighbours are close.
_OTHERS_SECONDS: Final = 1.0
_MOST_PROBES: Final = 100
_STEPS: Final = {
    "shard_fenced": "earlier producers are fenced",
    "progress_read": "the last ticket is read",
    "transaction_begun": "a transaction has begun",
    "transaction_sent": "the events are sent",
    "transaction_confirmed": "the events and the ticket are confirmed",
    "transaction_committed": "the transaction is committed",
    "transaction_aborting": "the transaction is aborted",
}


class _Ending(Enum):
    """The end of the wait for a transaction's records."""

    CONFIRMED = auto()
    REFUSED = auto()
    STOPPED = auto()
    SILENT = auto()
    BROKEN = auto()


class ShardProducer:
    """Publishes the parts of one shard, for one owner. One call at a time.

    A producer whose transaction was not committed for certain is thrown away. The next one begins with ``recover``: it
    ends what was under way, and reads what was committed.
    """

    def __init__(
        self,
        place: Place,
        *,
        config: Mapping[str, Any],
        topics: Topics,
        link: Link,
        progress: ProgressTopics,
        message_of: Callable[[Event], Message],
        default_topic: str,
    ) -> None:
        self.place = place
        self.stop = threading.Event()
        self._config = {**config, "transactional.id": transactional_id(place)}
        self._budget = float(config["transaction.timeout.ms"]) / 1000 * 2 / 3
        self._topics = topics
        self._link = link
        self._progress = progress
        self._outcomes = Outcomes(link.description, default_topic)
        self._targets = Targets(topics, link, self._outcomes, default_topic, config)
        self._message_of = message_of
        self._client: Client | None = None  # none until recover, and after a transaction that was not committed
        self._last = b""
        self._batch_bytes = 1 << 30  # the most that a record batch may have

    def recover(self) -> bytes:
        """See ``Publisher.recover``."""
        if self._client is None:
            self._progress.prepare(self.place)
            client = self._new_client()
            self.trace("shard_fenced")
            self._last = self._progress.last(self.place, partial(self._mark_end, client), self.stop)
            self.trace("progress_read")
            self._client = client
        return self._last

    def close(self) -> None:
        self._client = None

    def deliver(self, part: Part) -> list[Outcome]:
        """One outcome per event: all published, or none."""
        nothing = [UNTRIED] * len(part.events)
        if self._client is None or part.token != self.place.token:
            return nothing
        targets = self._targets.of(part.events, self.stop)
        if not targets:
            return nothing
        if self._client.sizes != self._topics.sizes:
            self._client = None  # it would make batches that a topic refuses
            return nothing
        call = Call(part.events, targets)
        messages = self._messages(call)
        if not messages:
            return call.outcomes
        client, self._client = self._client, None
        try:
            self._transact(client, call, messages, part.ticket)
        except KafkaException as error:
            # Whether it was committed is not known.
            return [self._failed(error.args[0])] * len(part.events)
        except Outage as error:
            return [outage(str(error))] * len(part.events)
        return call.outcomes

    def _new_client(self) -> Client:
        config = sized(self._config, self._topics.sizes)
        config["batch.size"] = min(config["batch.size"], self._batch_bytes)
        # A ticket can be larger than any event that the topics take.
        config["message.max.bytes"] = max(config["message.max.bytes"], TICKET_BYTES)
        client = Client(config, self._topics.sizes)
        try:
            client.producer.init_transactions(_INIT_SECONDS)
        except KafkaException as error:
            raise self._refused(error.args[0], client) from error
        return client

    def _mark_end(self, client: Client) -> int:
        """Commit a record without a ticket behind all that is in the progress of the shard. Returns its place."""
        found: list[Any] = [None]

        def report(_error: Any, record: Any) -> None:
            found[0] = record

        try:
            client.producer.begin_transaction()
            client.produce(progress_topic(self.place), None, end_key(self.place), self.place.shard, report)
            client.producer.commit_transaction(self._budget)
        except KafkaException as error:
            raise self._progress.outage(self.place, error.args[0]) from error
        return int(found[0].offset())

    def _refused(self, error: Any, client: Client) -> Outage | ConfigError:
        """Why no transaction can begin."""
        where = self._link.description
        code = error.code()
        if client.login_error:
            return Outage(self._outcomes.no_access(client.login_error).error or "")
        if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return Outage(f"{where} does not allow this client transactions; run: {commands(self.place)}")
        if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return ConfigError(
                f"{where} takes no transaction.timeout.ms={self._config['transaction.timeout.ms']}; lower it, or raise "
                "transaction.max.timeout.ms of the brokers"
            )
        if code in (KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION):
            return ConfigError(
                f"{where} has no transactions ({error.str()}); leave out delivery=exactly-once, or use Kafka 2.5 or "
                "newer"
            )
        if problem := transaction_problem(self._topics.admin):
            return Outage(f"{where} has no transactions yet: {problem}")
        return Outage(f"{where}: no transaction can begin ({error.str()}); the relay tries again")

    def _failed(self, error: Any) -> Outcome:
        if error.code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
            # Another owner has recovered the shard, or the transaction took too long.
            return UNTRIED
        return outage(f"{self._link.description}: a transaction failed ({error.str()})")

    def _messages(self, call: Call) -> list[Message]:
        """The messages of all events; none if one cannot be sent, whose outcome is recorded."""
        messages = []
        for index, event in enumerate(call.events):
            target = call.targets[event.topic]
            refusal = target.refusal
            if target.compacted and refusal is None:
                refusal = retry(
                    f"topic {target.topic!r} is compacted and forgets events; delivery=exactly-once needs "
                    "cleanup.policy=delete",
                    charged=False,
                )
            if refusal is None:
                try:
                    message = self._message_of(event)
                    if message.value is not None and len(message.value) > target.roomy_bytes:
                        refusal = target.refuse(message)
                    messages.append(message)
                except Exception as error:
                    refusal = self._outcomes.envelope(event, error)
            if refusal is not None:
                call.record(index, refusal)
        return messages if len(messages) == len(call.events) and not _failures(call) else []

    def _transact(self, client: Client, call: Call, messages: Sequence[Message], ticket: bytes) -> None:
        count = len(messages)
        ending = self._send(client, call, range(count), messages, ticket)
        if ending is _Ending.CONFIRMED:
            self.trace("transaction_confirmed")
            client.producer.commit_transaction(self._budget)
            self.trace("transaction_committed")
            self._last, self._client = ticket, client
            self._link.confirmed()
            for index in range(count):
                call.confirm(index)
            return
        errors = dict(client.errors)
        if ending is _Ending.BROKEN:
            return  # another owner has recovered the shard: the next recovery finds out
        self._abort(client)
        if ending is _Ending.SILENT:
            sentence = client.login_error or client.last_error or "no answer"
            text = f"{self._link.description} did not confirm a transaction within {self._budget:.0f} s ({sentence})"
            call.outcomes[:] = [outage(text)] * count
        elif ending is _Ending.REFUSED:
            self._record(call, messages, errors)

    def _send(
        self,
        client: Client,
        call: Call,
        indexes: Sequence[int],
        messages: Sequence[Message],
        ticket: bytes | None,
    ) -> _Ending:
        """Begin a transaction and send these messages, and the ticket if there is one."""
        reporters = client.begin(len(messages) + 1)
        client.producer.begin_transaction()
        self.trace("transaction_begun")
        for index in indexes:
            topic = call.targets[call.events[index].topic].topic
            if not self._produce(client, topic, messages[index], -1, reporters[index], index):
                return self._wait(client, len(messages) + 2)
        sent = len(indexes)
        if ticket is not None:
            self.trace("transaction_sent")
            place, last = self.place, len(messages)
            record = self._progress.record(place, ticket)
            self._produce(client, progress_topic(place), record, place.shard, reporters[last], last)
            sent += 1
        return self._wait(client, sent)

    def _produce(self, client: Client, topic: str, message: Message, partition: int, reporter: Any, index: int) -> bool:
        """Queue a message. False: nothing more can be sent in this transaction."""
        while True:
            try:
                client.produce(topic, message.value, message.key, partition, reporter, headers=message.headers)
                return True
            except BufferError:
                client.flush(TICK_SECONDS)
            except KafkaException as error:
                reason = error.args[0]
                if reason.fatal():
                    client.fatal = reason
                elif reason.code() != KafkaError._STATE:  # an earlier message has failed, and is reported
                    client.errors[index] = reason
                return False

    def _wait(self, client: Client, sent: int) -> _Ending:
        deadline = time.monotonic() + self._budget
        refused_at: float | None = None
        while client.flush(TICK_SECONDS):
            now = time.monotonic()
            if client.fatal is not None:
                return _Ending.BROKEN
            if self.stop.is_set():
                return _Ending.STOPPED
            if client.errors:
                refused_at = refused_at or now
                if now > refused_at + _OTHERS_SECONDS:
                    return _Ending.REFUSED
            elif now > deadline or client.login_error:
                return _Ending.SILENT
        if client.fatal is not None:
            return _Ending.BROKEN
        return _Ending.CONFIRMED if client.confirmed.count(1) == sent else _Ending.REFUSED

    def _abort(self, client: Client) -> None:
        """Abort the transaction, so that consumers need not wait for the next producer to do so."""
        self.trace("transaction_aborting")
        try:
            client.producer.abort_transaction(_ABORT_SECONDS)
        except KafkaException as error:
            logger.debug("%s: a transaction could not be aborted: %s", self._link.description, error.args[0].str())

    def _record(self, call: Call, messages: Sequence[Message], errors: dict[int, Any]) -> None:
        """Record the outcomes of the events that were refused. All others stay untried, and are charged nothing."""
        error = errors.pop(len(messages), None)
        if error is not None and error.code() not in PURGED:
            self._progress.forget(self.place)
            text = f"{self._link.description}: the progress topic {progress_topic(self.place)!r}: {error.str()}"
            call.outcomes[:] = [outage(text)] * len(messages)
            return
        suspects = []
        others = []
        for index, error in sorted(errors.items()):
            code = error.code()
            if code in PURGED:
                continue
            self._topics.forget(call.targets[call.events[index].topic].topic)
            if code in REFUSED_WITH_ITS_BATCH:
                suspects.append(index)
            elif code in TOPIC_ERRORS or code in ACCESS_ERRORS:
                self._refuse(call, index, error)
            else:
                others.append(error)
        if others:
            # No event is to blame for the trouble of a transaction.
            call.outcomes[:] = [self._failed(others[0])] * len(messages)
        elif len(suspects) == 1:
            self._refuse(call, suspects[0], errors[suspects[0]])
        elif suspects and not _failures(call):
            self._cut(call, messages, suspects)

    def _refuse(self, call: Call, index: int, error: Any) -> None:
        call.record(index, self._outcomes.classify(call.events[index], error))

    def _cut(self, call: Call, messages: Sequence[Message], suspects: Sequence[int]) -> None:
        """Find the events that Kafka refuses among those that it refused together: send ever smaller groups, in
        transactions that are aborted. Each has a new producer: after an abort librdkafka can purge what comes next."""
        groups, probes = list(_halves(suspects)), 0
        while groups and probes < _MOST_PROBES and not self.stop.is_set():
            group, probes = groups.pop(), probes + 1
            client = self._new_client()
            self._send(client, call, group, messages, None)
            errors = {index: error for index, error in client.errors.items() if error.code() in REFUSED_WITH_ITS_BATCH}
            self._abort(client)
            if len(group) == 1 and errors:
                self._refuse(call, group[0], errors[group[0]])
            elif errors:
                groups += _halves(group)
        if _failures(call):
            return
        # Each group passed by itself, so the batch was too large: the next producer makes smaller ones.
        if self._batch_bytes == 1:
            text = f"{self._link.description} refused the event with others, and takes it alone; tried again later"
            call.record(suspects[0], retry(text))
        size = sum(lone_batch_bytes(messages[index]) for index in suspects)
        self._batch_bytes = max(1, min(self._batch_bytes, size) // 2)

    def trace(self, action: str) -> None:
        """Write a step of the protocol into the log."""
        if logger.isEnabledFor(logging.DEBUG):
            fields = {"action": action, "stream": self.place.stream, "shard": self.place.shard}
            logger.debug("%s: %s", transactional_id(self.place), _STEPS[action], extra=fields)


def _failures(call: Call) -> bool:
    return any(outcome is not UNTRIED and outcome is not PUBLISHED for outcome in call.outcomes)


def _halves(group: Sequence[int]) -> Sequence[Sequence[int]]:
    """The second half and the first one."""
    middle = len(group) // 2
    return group[middle:], group[:middle]
