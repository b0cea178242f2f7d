"""Planted bugs of exactly once: steps of the protocol that a relay could leave out."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

from pillarbox.batch import Batch
from pillarbox.errors import ProgressError
from pillarbox.publisher import PUBLISHED, Outcome
from pillarbox.store import Grant, Progress

_LATE_SECONDS: Final = 0.2
_IMPATIENT_SECONDS: Final = 0.0005


def recovery_that_trusts_an_old_record(store: Any, publisher: Any) -> None:
    """A recovery takes the last ticket but one for the last. Where the store would notice, the bug stays away."""
    settle_ticket = store.settle_ticket

    async def careless(grant: Grant, ticket: bytes, **options: Any) -> Progress:
        before = ticket[17:33]
        old = ticket[:1] + before + bytes(16) if any(before) else b""
        with suppress(ProgressError):
            stale: Progress = await settle_ticket(grant, old, **options)
            return stale
        found: Progress = await settle_ticket(grant, ticket, **options)
        return found

    store.settle_ticket = careless


def settle_before_the_commit(store: Any, publisher: Any) -> None:
    """The events are settled, and then their transaction is committed."""
    send = publisher.publish
    committing: dict[int | None, asyncio.Task[None]] = {}

    async def commit(batch: Batch) -> None:
        await asyncio.sleep(_LATE_SECONDS)
        await send(batch)

    async def publish(batch: Batch) -> Sequence[Outcome]:
        for part in batch.parts:
            if part.shard in committing:
                await committing[part.shard]
            committing[part.shard] = asyncio.create_task(commit(Batch(batch.stream, [part])))
        return [PUBLISHED] * len(batch)

    publisher.publish = publish


def _change_producers(publisher: Any, change: Callable[[Any], None]) -> None:
    """Have the publisher make other producers of shards."""
    producers_of = getattr(publisher, "_shard_producers", None)
    if producers_of is None:  # the store of an operator has none
        return

    def careless(topics: Any) -> Any:
        producers = producers_of(topics)
        make = producers._make

        def changed(place: Any) -> Any:
            producer = make(place)
            change(producer)
            return producer

        producers._make = changed
        return producers

    publisher._shard_producers = careless


def no_fencing_at_take_over(store: Any, publisher: Any) -> None:
    """Each owner has a transactional id of its own, so that no producer ends those of earlier owners."""

    def change(producer: Any) -> None:
        producer._config["transactional.id"] += f".{producer.place.token}"

    _change_producers(publisher, change)


def producer_used_again_after_a_doubt(store: Any, publisher: Any) -> None:
    """A commit that was not answered in time counts as failed, and its producer is used again. Commits are impatient,
    so that the bug always shows."""
    from confluent_kafka import KafkaException  # writers import this module, and start sooner without

    def change(producer: Any) -> None:
        transact, trace, patience, calls = producer._transact, producer.trace, producer._budget, count()

        def impatient(action: str) -> None:
            trace(action)
            if action == "transaction_confirmed" and next(calls) % 3 == 0:
                producer._budget = _IMPATIENT_SECONDS

        def careless(client: Any, *arguments: Any) -> None:
            try:
                transact(client, *arguments)
            except KafkaException:
                with suppress(KafkaException):
                    client.producer.commit_transaction(patience)
                producer._client = client
                raise
            finally:
                producer._budget = patience

        producer.trace, producer._transact = impatient, careless

    _change_producers(publisher, change)


BUGS: Final[dict[str, Callable[[Any, Any], None]]] = {
    each.__name__: each
    for each in (
        recovery_that_trusts_an_old_record,
        settle_before_the_commit,
        no_fencing_at_take_over,
        producer_used_again_after_a_doubt,
    )
}
