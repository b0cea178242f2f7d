"""Planted bugs: mistakes that a relay, a consumer or a request could make. A run switches one on by its name, and the
checker must find it.

Each changes the store, the publisher, the inbox or the idempotency keys of one process from outside the library.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pillarbox import Event
from pillarbox.batch import Batch, Part
from pillarbox.drivers.contract import Answer, Driver, Statement, Steps
from pillarbox.idempotency import Idempotency, Reply, Request
from pillarbox.inbox import sql as inbox
from pillarbox.inbox.work import Entry, Place
from pillarbox.publisher import PUBLISHED, Outcome, Result, rejected, retry
from pillarbox.store import Claim, ClaimResults, Failure, Grant, Settlement
from proof.planted_exactly_once import BUGS as EXACTLY_ONCE

if TYPE_CHECKING:
    from pillarbox.conformance.probes import SqlProbe

# A bug of the writers, not of the relays: a rolled-back transaction leaves its event behind.
EVENT_IN_A_TRANSACTION_OF_ITS_OWN: Final = "event_in_a_transaction_of_its_own"
_BUFFERED_SECONDS: Final = 0.5
_CROSSING_SECONDS: Final = 0.2
_LOOKING_SECONDS: Final = 0.01
_PATIENT_SECONDS: Final = 5.0
_background: set[asyncio.Task[Any]] = set()

Held: TypeAlias = Mapping[int, Collection[str]]
Settle: TypeAlias = Callable[[Sequence[Settlement]], Awaitable[Held]]


def _keep(task: asyncio.Task[Any]) -> None:
    _background.add(task)
    task.add_done_callback(_background.discard)


def plant(name: str | None, store: Any, publisher: Any) -> None:
    """Change this store and this publisher so that they have the bug."""
    if name in _OF_RELAYS:
        _OF_RELAYS[name](store, publisher)


def plant_in_requests(name: str | None, once: Idempotency) -> None:
    """Change the idempotency keys of this writer so that they have the bug."""
    if name in _OF_REQUESTS:
        _OF_REQUESTS[name](once)


def settle_before_the_acknowledgement(store: Any, publisher: Any) -> None:
    """A sent event counts as confirmed."""
    send = publisher.publish

    async def later(batch: Batch) -> None:
        await asyncio.sleep(_BUFFERED_SECONDS)
        await send(batch)

    async def publish(batch: Batch) -> Sequence[Outcome]:
        _keep(asyncio.create_task(later(batch)))
        return [PUBLISHED] * len(batch)

    publisher.publish = publish


def delivery_report_ignored(store: Any, publisher: Any) -> None:
    """A rejected event counts as published."""
    send = publisher.publish

    async def publish(batch: Batch) -> Sequence[Outcome]:
        await send(batch)
        return [PUBLISHED] * len(batch)

    publisher.publish = publish


def _probe(store: Any) -> "SqlProbe":
    """Reads the database directly; the planted bugs that need it run on SQL databases."""
    from pillarbox.conformance.probes import probe_of  # a relay without a bug needs no test tools

    probe: SqlProbe = probe_of(store)
    return probe


async def _current(store: Any, grant: Grant) -> Grant:
    """The grant with the token and the owner that the lease has now."""
    text = "SELECT token, owner FROM {lease} WHERE stream = :stream AND shard = :shard"
    ((token, owner),) = await _probe(store).query(text, stream=grant.stream, shard=grant.shard)
    return grant._replace(token=token, worker=owner or grant.worker)


async def _settle_as_the_owner(store: Any, settle: Settle, settlement: Settlement) -> Held:
    """Settle with the token that the lease has now.

    Another worker may take the lease before the call arrives. Then it is tried again, so that the bug always shows.
    """
    deadline = time.monotonic() + _PATIENT_SECONDS
    while True:
        held = await settle([replace(settlement, grant=await _current(store, settlement.grant))])
        if held or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.01)


def _replace_statement(store: Any, name: str, text: str) -> None:
    statements = _probe(store).statements
    if name not in statements:
        raise ValueError(f"{store.description} has no statement {name!r}; plant this bug on another database")
    statements[name] = statements.make(text)


def settle_without_the_token(store: Any, publisher: Any) -> None:
    """A stale owner settles all the same."""
    settle = store.settle

    async def careless(settlements: Sequence[Settlement]) -> Held:
        held = dict(await settle(settlements))
        for settlement in settlements:
            if settlement.grant.shard not in held:
                held |= await _settle_as_the_owner(store, settle, settlement)
        return held

    store.settle = careless


def settle_that_crosses_a_take_over(store: Any, publisher: Any) -> None:
    """The lease was checked by the read, and the events are changed a moment later."""
    settle = store.settle

    async def careless(settlements: Sequence[Settlement]) -> Held:
        await asyncio.sleep(_CROSSING_SECONDS)
        held: dict[int, Collection[str]] = {}
        for settlement in settlements:
            held |= await _settle_as_the_owner(store, settle, settlement)
        return held

    store.settle = careless


def read_without_the_token(store: Any, publisher: Any) -> None:
    """A stale owner reads, and goes on publishing."""
    read = store.read

    async def careless(grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        deadline = time.monotonic() + _PATIENT_SECONDS
        while True:
            current = [await _current(store, grant) for grant in grants]
            parts: Sequence[Part] = await read(current, limit, max_bytes)
            # The new owner leaves little to read: wait for it, so that the bug always shows.
            if parts or current == list(grants) or time.monotonic() > deadline:
                tokens = {grant.shard: grant.token for grant in grants}
                return [part._replace(token=tokens[part.shard or 0]) for part in parts]
            await asyncio.sleep(0.001)

    store.read = careless
    settle_without_the_token(store, publisher)


def _change_reads(store: Any, change: Callable[[Part], Sequence[Event]]) -> None:
    """Have each read return other events than the store found."""
    read = store.read

    async def careless(grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        parts = [part._replace(events=change(part)) for part in await read(grants, limit, max_bytes)]
        return [part for part in parts if part.events]

    store.read = careless


def order_by_id(store: Any, publisher: Any) -> None:
    """Events are read in the order of the writers' clocks, not of the commits."""
    _change_reads(store, lambda part: sorted(part.events, key=lambda event: event.id))


def only_after_the_last_seen(store: Any, publisher: Any) -> None:
    """An event that commits late, with a lower number, is never seen."""
    seen: dict[int | None, int] = {}

    def after_the_last(part: Part) -> Sequence[Event]:
        last = seen.get(part.shard, 0)
        events = [event for event in part.events if event.seq > last]
        seen[part.shard] = max([last, *(event.seq for event in events)])
        return events

    _change_reads(store, after_the_last)


def prune_that_ignores_the_state(store: Any, publisher: Any) -> None:
    """Old events are pruned, published or not."""
    prune = store.prune_published

    async def careless(keep_seconds: float, limit: int, after: Any = None) -> Any:
        text = "DELETE FROM {event} WHERE id IN (SELECT id FROM {event} WHERE status <> 'published' LIMIT 3)"
        await _probe(store).execute(text)
        return await prune(keep_seconds, limit, after)

    store.prune_published = careless


def outage_charged(store: Any, publisher: Any) -> None:
    """An outage charges an attempt."""
    send = publisher.publish

    async def publish(batch: Batch) -> Sequence[Outcome]:
        task = asyncio.create_task(send(batch))
        done, _ = await asyncio.wait([task], timeout=0.5)
        if done:
            outcomes: Sequence[Outcome] = task.result()
            return [retry(each.error or "") if each.is_outage else each for each in outcomes]
        _keep(task)
        return [retry("the destination did not answer")] * len(batch)

    publisher.publish = publish


def leases_by_the_workers_clock(store: Any, publisher: Any) -> None:
    """A worker whose clock is ahead takes shards that others own."""
    take, look = store.take, store.poll

    async def careless(stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        here = datetime.now(UTC).isoformat(" ")
        text = (
            f"SELECT shard, owner FROM {{lease}} WHERE stream = :stream AND (owner IS NULL OR lease_until < '{here}')"
        )
        _replace_statement(store, "takeable", f"{text} LIMIT :limit")
        grants: Sequence[Grant] = await take(stream, worker, limit, seconds)
        return grants

    async def poll(stream: str, worker: str, grants: Any) -> Any:
        return replace(await look(stream, worker, grants), free=1)

    store.poll = poll
    store.take = careless


def _again(payload: bytes) -> bytes:
    try:
        return json.dumps(json.loads(payload), indent=1).encode()
    except (ValueError, RecursionError):
        return payload


def payload_serialised_again(store: Any, publisher: Any) -> None:
    """The payload is parsed and written again: the same JSON in other bytes."""
    send = publisher.publish

    async def publish(batch: Batch) -> Sequence[Outcome]:
        again = [
            part._replace(events=[event._replace(payload=_again(event.payload)) for event in part.events])
            for part in batch.parts
        ]
        outcomes: Sequence[Outcome] = await send(Batch(batch.stream, again))
        return outcomes

    publisher.publish = publish


def _change_settlements(store: Any, change: Callable[[Settlement], Settlement]) -> None:
    """Have each settle write something else than the relay decided."""
    settle = store.settle

    async def careless(settlements: Sequence[Settlement]) -> Held:
        held: Held = await settle([change(settlement) for settlement in settlements])
        return held

    store.settle = careless


def retry_overtaken_by_its_key(store: Any, publisher: Any) -> None:
    """A failed event does not hold its key."""

    def without_holding(settlement: Settlement) -> Settlement:
        failed = [failure._replace(delay=0.3) for failure in settlement.failed]
        return replace(settlement, failed=failed, hold_keys={}, held=())

    _change_settlements(store, without_holding)


def whole_batch_declared_dead(store: Any, publisher: Any) -> None:
    """One rejected event kills the whole batch."""
    send = publisher.publish

    async def publish(batch: Batch) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = await send(batch)
        if any(outcome.result is Result.REJECTED for outcome in outcomes):
            return [rejected("its batch was refused")] * len(batch)
        return outcomes

    publisher.publish = publish


def dead_before_its_attempts(store: Any, publisher: Any) -> None:
    """An event dies of its first failure."""

    def all_dead(settlement: Settlement) -> Settlement:
        dead = [*settlement.dead, *(Failure(each.event, each.error, each.attempts) for each in settlement.failed)]
        return replace(settlement, dead=dead, failed=(), hold_keys={})

    _change_settlements(store, all_dead)


def replay_that_forgets_its_key(store: Any, publisher: Any) -> None:
    """A replayed event is back, but its key stays blocked."""
    text = "UPDATE {held_key} AS k SET mode = mode WHERE k.stream = :stream AND k.shard = :shard AND k.key = :key"
    _replace_statement(store, "free_key", text)


def sent_again_to_be_sure(store: Any, publisher: Any) -> None:
    """Confirmed events are sent once more, as by a producer that is not idempotent."""
    send = publisher.publish
    calls = count()

    async def publish(batch: Batch) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = await send(batch)
        if next(calls) % 10 == 0:
            confirmed = [event for event, each in zip(batch, outcomes, strict=True) if each == PUBLISHED]
            await send(Batch.of(confirmed, batch.stream))
        return outcomes

    publisher.publish = publish


def take_over_that_resets_what_is_published(store: Any, publisher: Any) -> None:
    """A new owner makes published events pending again."""
    take = store.take

    async def careless(stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        grants: Sequence[Grant] = await take(stream, worker, limit, seconds)
        text = (
            "UPDATE {event} SET status = 'pending' WHERE stream = :stream AND shard = :shard AND status = 'published'"
        )
        for grant in grants:
            await _probe(store).execute(text, stream=stream, shard=grant.shard)
        return grants

    store.take = careless


async def _current_token(store: Any, claim: Claim) -> int:
    found = [each for each in await store.find_by_id(claim.event.id) if each.event.stream == claim.event.stream]
    return int(found[0].lease_token) if found else claim.token


def claim_settled_without_its_token(store: Any, publisher: Any) -> None:
    """A worker whose event was rescued settles it all the same."""
    settle_claims = store.settle_claims

    async def careless(claims: Sequence[Claim], results: ClaimResults) -> int:
        refused: int = await settle_claims(claims, results)
        if refused:
            again = [claim._replace(token=await _current_token(store, claim)) for claim in claims]
            await settle_claims(again, results)
        return 0

    store.settle_claims = careless


def claim_of_what_another_has(store: Any, publisher: Any) -> None:
    """An event that another worker has is claimed as well."""
    text = """SELECT id FROM {event} WHERE stream = :stream AND shard = :shard AND status IN ('pending', 'processing')
        ORDER BY seq LIMIT :limit"""
    _replace_statement(store, "ready", text)


def _change_records(change: Callable[[Place, Entry, Driver, Steps[bool]], Steps[bool]]) -> None:
    """Have the inbox of this process record events in another way than by one insert."""
    record = inbox.record

    def careless(place: Place, entry: Entry, is_limited: bool, driver: Driver) -> Steps[bool]:
        return change(place, entry, driver, record(place, entry, is_limited, driver))

    inbox.record = careless


def inbox_looks_first(store: Any, publisher: Any) -> None:
    """Two copies at once both find nothing. The insert of the second, which changes nothing, counts as one too."""

    def look_first(place: Place, entry: Entry, driver: Driver, record: Steps[bool]) -> Steps[bool]:
        consumer, event_id = driver.dialect.marks(2)
        text = f"SELECT 1 FROM {place.names.parts['inbox']} WHERE consumer = {consumer} AND event_id = {event_id}"
        found: Answer = yield Statement(text, [place.consumer, entry.id], has_rows=True)
        if found.rows:
            return False
        time.sleep(_LOOKING_SECONDS)  # so that the bug always shows
        yield from record
        return True

    _change_records(look_first)


def inbox_marks_in_its_own_transaction(store: Any, publisher: Any) -> None:
    """An event whose handler fails counts as applied."""

    def commit_first(place: Place, entry: Entry, driver: Driver, record: Steps[bool]) -> Steps[bool]:
        is_new = yield from record
        yield Statement("COMMIT")
        yield Statement("BEGIN")
        return is_new

    _change_records(commit_first)


def answer_before_commit(once: Any) -> None:
    """The client has its answer, and then the transaction fails."""
    run = once.run
    calls = count()

    def careless(request: Request, work: Callable[[Any], tuple[int, Any]]) -> Reply:
        early: list[Reply] = []

        def answer(tx: Any) -> tuple[int, Any]:
            status, body = work(tx)
            early.append(Reply(status, body or b""))
            return (500, b"") if next(calls) % 3 == 0 else (status, body)

        reply: Reply = run(request, answer)
        return early[0] if early else reply

    once.run = careless


_OF_RELAYS: Final[dict[str, Callable[[Any, Any], None]]] = {
    each.__name__: each
    for each in (
        settle_before_the_acknowledgement,
        delivery_report_ignored,
        settle_without_the_token,
        settle_that_crosses_a_take_over,
        read_without_the_token,
        order_by_id,
        only_after_the_last_seen,
        prune_that_ignores_the_state,
        outage_charged,
        leases_by_the_workers_clock,
        payload_serialised_again,
        retry_overtaken_by_its_key,
        whole_batch_declared_dead,
        dead_before_its_attempts,
        replay_that_forgets_its_key,
        sent_again_to_be_sure,
        take_over_that_resets_what_is_published,
        claim_settled_without_its_token,
        claim_of_what_another_has,
        inbox_looks_first,
        inbox_marks_in_its_own_transaction,
    )
} | EXACTLY_ONCE
_OF_REQUESTS: Final[dict[str, Callable[[Idempotency], None]]] = {answer_before_commit.__name__: answer_before_commit}
PLANTED: Final = (*_OF_RELAYS, *_OF_REQUESTS, EVENT_IN_A_TRANSACTION_OF_ITS_OWN)
