"""Where the dead events of a consumer go: into its store, or to a destination."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from pillarbox.batch import Batch
from pillarbox.errors import Outage
from pillarbox.publisher import Publisher, Result
from pillarbox.store import Failure
from pillarbox.store.consumers import Consumers

# Headers of a dead letter at a destination.
ERROR_HEADER: Final = "dead_error"
CONSUMER_HEADER: Final = "dead_consumer"
TOPIC_HEADER: Final = "dead_topic"


class Letters(Protocol):
    """Keeps dead events."""

    async def bury(self, failure: Failure, earlier: Sequence[Mapping[str, Any]]) -> bool:
        """Keep it for good. False: the store says that the event was applied, or that it is dead already.

        earlier: its errors before this one, oldest first. Raises StoreDown or Outage to be tried again, StoreError if
        somebody has to act."""
        ...


class StoreLetters:
    """Dead letters in the store, beside the inbox."""

    def __init__(self, store: Consumers, consumer: str) -> None:
        self._store, self._consumer = store, consumer

    async def bury(self, failure: Failure, earlier: Sequence[Mapping[str, Any]]) -> bool:
        return await self._store.bury(self._consumer, failure, earlier)


class SentLetters:
    """Dead letters at a destination: the event as it is, and in headers why it is there.

    The destination has its own topic; that of the event stands in a header.
    """

    def __init__(self, publisher: Publisher, consumer: str) -> None:
        self._publisher, self._consumer = publisher, consumer

    async def bury(self, failure: Failure, earlier: Sequence[Mapping[str, Any]]) -> bool:
        event = failure.event
        headers = {
            **event.headers,
            ERROR_HEADER: failure.error,
            CONSUMER_HEADER: self._consumer,
            TOPIC_HEADER: event.topic,
        }
        (outcome,) = await self._publisher.publish(Batch.of([event._replace(topic="", headers=headers)]))
        if outcome.result is not Result.PUBLISHED:
            raise Outage(f"{self._publisher.description} does not take it: {outcome.error or 'no reason given'}")
        return True
