"""From an error of Pulsar to an event's outcome, with a sentence that names the remedy."""

import logging
from typing import Any, Final

from pillarbox.errors import PillarboxError
from pillarbox.event import Event
from pillarbox.publisher import Outcome, outage, rejected, retry

logger = logging.getLogger("pillarbox.publishers.pulsar")

NO_TOPIC: Final = "the event has no topic, and topic='*' gives it none; give events a topic, or the publisher a default"
WAIT_SECONDS: Final = 5.0  # of an event whose topic needs an operator

_REFUSED: Final = frozenset({"InvalidMessage"})
ACCESS_ERRORS: Final = frozenset({"AuthenticationError", "ErrorGettingAuthenticationData"})
# Errors of an address, each with what an operator can do.
_ADDRESS_ERRORS: Final = {
    "TopicNotFound": "does not exist; create it, or its namespace",
    "InvalidTopicName": "is not a name that Pulsar takes; use letters, digits, '-', '_', '.', ':' and '='",
    "TopicTerminated": "was terminated and takes nothing any more; send events to another topic",
    "IncompatibleSchema": "takes only messages with a schema, and these have none; do not enforce a schema there",
    "NotAllowedError": "does not allow this client to write; allow it",
    "AuthorizationError": "may not be written by this client; grant it the permission to produce",
    "ProducerBlockedQuotaExceededError": "has used up its quota; consume its backlog or raise the quota",
    "ProducerBlockedQuotaExceededException": "has used up its quota; consume its backlog or raise the quota",
    "ProducerBusy": "has too many producers, or an exclusive one; raise the limit or end that producer",
    "ProducerFenced": "has an exclusive producer; end that producer",
}
# Nothing can change these.
_FINAL_ERRORS: Final = frozenset({"InvalidTopicName", "TopicTerminated"})
_UNREACHED: Final = frozenset({
    "ConnectError", "Timeout", "ReadError", "NotConnected", "AlreadyClosed", "Interrupted", "LookupError",
})  # fmt: skip
# The client lost its connection while the event was on its way, or cannot keep more.
_BLAMELESS: Final = frozenset({
    "AlreadyClosed", "ChecksumError", "ConnectError", "NotConnected", "Timeout", "ReadError", "Interrupted",
    "ServiceUnitNotReady", "LookupError", "TooManyLookupRequestException", "ProducerNotInitialized",
    "BrokerMetadataError", "BrokerPersistenceError", "MemoryBufferIsFull", "ProducerQueueIsFull",
})  # fmt: skip


def is_unreached(name: str) -> bool:
    """Whether this error in place of a topic's producers says that no broker answered."""
    return name in _UNREACHED


def name_of(error: BaseException) -> str:
    """The client's name of an error: that of its class, and of the result that it stands for."""
    return type(error).__name__


class Outcomes:
    """Outcomes for one destination."""

    def __init__(self, destination: str, max_message_bytes: int) -> None:
        self._destination = destination
        self._max_message_bytes = max_message_bytes

    def classify(self, name: str, topic: str, *, own: bool, count: int = 1) -> Outcome:
        """The outcome for the result of an event. own: the event names its topic. count: events of its wave."""
        if name == "MessageTooBig":
            if count > 1:
                return outage(
                    f"{self._destination} refuses a batch as too big; set max_message_bytes= to maxMessageSize "
                    "of the brokers or of the topic, whichever is smaller"
                )
            return self.too_big(topic)
        if name in _REFUSED:
            return rejected(f"{self._destination} refused the event for topic {topic!r}: {name}")
        if name in ACCESS_ERRORS:
            return self.no_access(name)
        if name in _ADDRESS_ERRORS:
            return self.address(name, topic, own=own)
        # Nobody knows whose fault another error is.
        is_blameless = name in _BLAMELESS
        return retry(f"{self._destination}: {name}", charged=not is_blameless, ambiguous=not is_blameless)

    def too_big(self, topic: str, size: int | None = None) -> Outcome:
        found = "is larger than" if size is None else f"takes {size} bytes, which is more than"
        return rejected(
            f"the event {found} topic {topic!r} takes (max_message_bytes={self._max_message_bytes}); raise "
            "maxMessageSize of the brokers and max_message_bytes, or store the content elsewhere and send a reference"
        )

    @staticmethod
    def is_of_address(name: str) -> bool:
        return name in _ADDRESS_ERRORS

    def address(self, name: str, topic: str, *, own: bool) -> Outcome:
        # Someone can create a topic or allow it; no event is to blame. Without the default topic nothing goes on.
        sentence = f"topic {topic!r} on {self._destination} {_ADDRESS_ERRORS[name]}"
        if not own:
            return outage(sentence)
        if name in _FINAL_ERRORS:
            return rejected(sentence)
        return retry(sentence, charged=False, after_seconds=WAIT_SECONDS)

    def no_topic(self) -> Outcome:
        return retry(NO_TOPIC, charged=False, after_seconds=WAIT_SECONDS)

    def no_access(self, name: str) -> Outcome:
        return outage(f"{self._destination} refuses this client ({name}); correct its credentials")

    def away(self, topic: str, name: str, *, others: bool) -> Outcome:
        """others: other topics are served."""
        though = ", though others are" if others else ""
        sentence = f"topic {topic!r} on {self._destination} is not served now ({name}){though}; tried again later"
        return retry(sentence, charged=False, after_seconds=WAIT_SECONDS)

    def default_away(self, topic: str, name: str) -> Outcome:
        return outage(f"topic {topic!r} on {self._destination} is not served now ({name}); its broker's log says why")

    def stuck(self, topic: str, seconds: float, *, others: bool) -> Outcome:
        if others:
            return retry(
                f"{self._destination} confirmed nothing on the partition of topic {topic!r} for {seconds:g} s, "
                "though it did on others; tried again later",
                charged=False,
            )
        return outage(f"{self._destination} answers questions, but confirmed nothing for {seconds:g} s")

    def in_vain(self, topic: str, *, others: bool) -> Outcome:
        """Nothing is confirmed though the topic is there. others: something else was confirmed."""
        sentence = (
            f"topic {topic!r} on {self._destination} is there, but the broker ends the connection each time it is sent "
            "this; most likely a message or a batch is larger than the maxMessageSize of the topic: set "
            "max_message_bytes= to it"
        )
        if others:
            return retry(sentence, charged=False, after_seconds=WAIT_SECONDS)
        return outage(sentence)

    def envelope(self, event: Event, error: Exception) -> Outcome:
        if isinstance(error, PillarboxError):
            return rejected(str(error))
        logger.debug("the envelope failed on event %s", event.id, exc_info=error)
        # Only the kind: the text might quote the payload.
        return rejected(f"the envelope or header builder failed with {name_of(error)}; correct it")


def is_ok(result: Any) -> bool:
    return bool(result.name == "Ok")
