"""From an error of Kafka to an event's outcome, with a sentence that names the remedy."""

import logging
from typing import Any, Final

from confluent_kafka import KafkaError

from pillarbox.errors import PillarboxError
from pillarbox.event import Event
from pillarbox.publisher import Outcome, outage, rejected, retry
from pillarbox.publishers.kafka.topics import Problem, topic_problem

logger = logging.getLogger("pillarbox.publishers.kafka")

NO_TOPIC: Final = "the event has no topic, and topic='*' gives it none; give events a topic, or the publisher a default"
# The wait of an event whose topic is missing: as long as the topic has been missing, within these bounds.
WAIT_SECONDS: Final = (1.0, 30.0)

REFUSED_WITH_ITS_BATCH: Final = frozenset(
    {
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.POLICY_VIOLATION,
        KafkaError._INVALID_DIFFERENT_RECORD,  # another event of its batch is to blame
    }
)
TOPIC_ERRORS: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
    }
)
ACCESS_ERRORS: Final = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
# The client lost its partition or its broker while the event was on its way.
_BLAMELESS: Final = frozenset(
    {KafkaError._DESTROY, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT}
)
PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._FATAL})


class Outcomes:
    """Outcomes for one destination."""

    def __init__(self, destination: str, default_topic: str) -> None:
        self._destination = destination
        self._default_topic = default_topic

    def classify(self, event: Event, error: Any) -> Outcome:
        """The outcome for an error that was reported for this event."""
        code = error.code()
        topic = event.topic or self._default_topic
        if code == KafkaError.MSG_SIZE_TOO_LARGE:
            return rejected(
                f"the event is larger than topic {topic!r} takes; raise max.message.bytes of the topic, "
                "or store the content elsewhere and send a reference"
            )
        if code in REFUSED_WITH_ITS_BATCH:
            return rejected(f"{self._destination} refused the event for topic {topic!r}: {error.str()}")
        if code in TOPIC_ERRORS:
            return self.topic(topic_problem(topic, self._destination, error), own=bool(event.topic))
        if code in ACCESS_ERRORS:
            return self.no_access(error.str())
        return retry(f"{self._destination}: {error.str()}", charged=not (error.retriable() or code in _BLAMELESS))

    def topic(self, problem: Problem, *, own: bool) -> Outcome:
        # Someone can create a topic or allow it; no event is to blame. Without the default topic nothing goes on.
        if not own:
            return outage(problem.sentence)
        if problem.is_final:
            return rejected(problem.sentence)
        shortest, longest = WAIT_SECONDS
        return retry(problem.sentence, charged=False, after_seconds=min(longest, max(shortest, problem.seconds)))

    def no_topic(self) -> Outcome:
        return retry(NO_TOPIC, charged=False, after_seconds=WAIT_SECONDS[1])

    def no_access(self, reason: str | None) -> Outcome:
        return outage(f"{self._destination} refuses this client: {reason}; correct its credentials or permissions")

    def stuck(self, seconds: float) -> Outcome:
        return retry(
            f"{self._destination} confirmed nothing on this event's partition for {seconds:g} s, "
            "though it did on others; tried again later",
            charged=False,
        )

    def unreported(self) -> Outcome:
        return retry(f"{self._destination} gave no report for this event; tried again later", charged=False)

    def producer_failed(self, fatal: Any) -> Outcome:
        if fatal.code() in ACCESS_ERRORS:
            return self.no_access(fatal.str())
        sentence = f"the producer for {self._destination} failed: {fatal.str()}; a new one is used"
        return retry(sentence, charged=False)

    def envelope(self, event: Event, error: Exception) -> Outcome:
        if isinstance(error, PillarboxError):
            return rejected(str(error))
        logger.debug("the envelope failed on event %s", event.id, exc_info=error)
        # Only the kind: the text might quote the payload.
        return rejected(f"the envelope or header builder failed with {type(error).__name__}; correct it")
