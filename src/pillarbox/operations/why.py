"""Why an event is not at its destination, in one sentence, and the command that helps."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from shlex import quote
from typing import Any, Final, NamedTuple
from uuid import UUID

from pillarbox.event import Mode, Status
from pillarbox.operations.desk import Desk, SeveralStreams
from pillarbox.operations.records import iso
from pillarbox.store import PARKED, Ahead, Found, HoldMode, StreamGauges, WorkerStatus

_RATE_SECONDS: Final = 1.0
_COUNTED: Final = 10_000


class Why(NamedTuple):
    """The answer. ``cause`` is a stable word for programs, ``facts`` has what the sentence is made of."""

    cause: str
    sentence: str
    command: str | None  # that helps; none: nothing has to be done
    facts: Mapping[str, Any]


class _Place(NamedTuple):
    """An event and what the outbox knows of its stream."""

    found: Found
    now: datetime
    gauges: StreamGauges
    workers: Sequence[WorkerStatus]

    @property
    def stream(self) -> str:
        return self.found.event.stream


async def why(
    store: Desk,
    id: UUID,
    stream: str | None = None,
    *,
    wait: Callable[[float], Awaitable[object]] | None = None,
) -> Why:
    """Why this event is not published yet: the first cause that applies.

    wait: sleeps for so many seconds, so that the speed of its shard can be measured; none: the speed is not told.
    Raises SeveralStreams if no stream is given and several have the id."""
    everywhere = await store.find_by_id(id)
    events = [each for each in everywhere if stream is None or each.event.stream == stream]
    if len(events) > 1:
        raise SeveralStreams({id: [each.event.stream for each in events]})
    if everywhere and not events:
        streams = sorted(each.event.stream for each in everywhere)
        return Why(
            "elsewhere",
            f"stream {stream!r} has no event {id}; it is in stream {' and '.join(map(repr, streams))}",
            f"pillarbox events why {id} --stream {quote(streams[0])}",
            {"streams": streams},
        )
    if not events:
        return Why(
            "unknown",
            f"the outbox has no event {id}: its transaction is not committed or was rolled back, or the event was "
            "pruned after it was published",
            "pillarbox events list --since 1h",
            {},
        )
    (found,) = events
    (gauges,) = [each for each in await store.gauges(1) if each.stream == found.event.stream] or [
        StreamGauges(found.event.stream, None, None, False, {}, (), None, {}, 0, 0)
    ]
    place = _Place(found, await store.clock(), gauges, (await store.workers()).get(found.event.stream, ()))
    if found.event.status is Status.DEAD and found.last_error == PARKED and (answer := await _key(store, place)):
        return answer
    answer = _own_state(place) or await _paused(store, place) or _workers(place) or await _key(store, place)
    return answer or _attempt(place) or await _queue(store, place, wait)


def _own_state(place: _Place) -> Why | None:
    found, event = place.found, place.found.event
    show = f"pillarbox events show {event.id} --stream {quote(event.stream)}"
    if event.status is Status.PUBLISHED:
        at = _at(found.published_at)
        return Why("published", f"it was published at {at}", show, {"published_at": at})
    if event.status is Status.DEAD:
        replay = f"pillarbox dead replay {event.id} --stream {quote(event.stream)}"
        sentence = f"it is a dead letter since {_at(found.last_error_at)}: {found.last_error}"
        return Why("dead", sentence, replay, {"died_at": _at(found.last_error_at), "error": found.last_error})
    if event.status is Status.SCHEDULED and found.next_attempt_at is not None and found.next_attempt_at > place.now:
        at, left = _at(found.next_attempt_at), _left(place, found.next_attempt_at)
        return Why("scheduled", f"it is scheduled for {at}, in {left}", None, {"available_at": at})
    return None


async def _paused(store: Desk, place: _Place) -> Why | None:
    if not place.gauges.paused:
        return None
    resume = f"pillarbox streams resume {quote(place.stream)}"
    rows = await store.audit(1, place.stream, "pause")
    if not rows:
        return Why("paused", f"its stream {place.stream!r} is paused", resume, {})
    by, at = rows[0].by, iso(rows[0].at)
    return Why("paused", f"its stream {place.stream!r} is paused by {by} since {at}", resume, {"by": by, "since": at})


def _workers(place: _Place) -> Why | None:
    live = [worker for worker in place.workers if worker.live]
    if not live:
        gone = [worker for worker in place.workers if worker.shards]
        hint = f"; worker {gone[0].name} that had it is gone" if gone else ""
        sentence = f"no relay serves its stream {place.stream!r}{hint}"
        return Why("unserved", sentence, f"pillarbox relay --stream {quote(place.stream)}", {"stream": place.stream})
    waiting = [worker for worker in live if worker.circuit_error is not None]
    # Another worker may reach the destination, and then has the shards of all.
    if len(waiting) < len(live):
        return None
    worst = max(waiting, key=lambda worker: worker.circuit_seconds or 0.0)
    since = iso(place.now - timedelta(seconds=worst.circuit_seconds or 0.0))
    destination = place.gauges.destination or "its destination"
    return Why(
        "circuit_open",
        f"{destination} is down since {since}: {worst.circuit_error}; nothing is charged, and the relay tries again by "
        "itself",
        "pillarbox doctor",
        {"since": since, "error": worst.circuit_error, "destination": place.gauges.destination},
    )


async def _key(store: Desk, place: _Place) -> Why | None:
    event = place.found.event
    if event.key is None:
        return None
    keys = await store.stuck_keys(event.stream, 1, event.key)
    if not keys or keys[0].head == event.id:
        # Of the first event of a key only the key has the instant of its next attempt.
        return _failed(place, keys[0].next_attempt_at) if keys else None
    key = keys[0]
    if key.head is None:
        return None  # nothing of it is failed or held any more, and its worker is about to release it
    facts = {"key": event.key, "mode": key.mode.value, "head": str(key.head), "error": key.error}
    if key.mode is HoldMode.RETRYING:
        due = "soon" if key.next_attempt_at is None else _when(place, key.next_attempt_at)
        failed = f", which failed: {key.error}" if key.error else ""
        facts["next_attempt_at"] = None if key.next_attempt_at is None else iso(key.next_attempt_at)
        return Why(
            "held",
            f"event {key.head} of its key {event.key!r} comes first{failed}; its next attempt is {due}",
            f"pillarbox events show {key.head} --stream {quote(event.stream)}",
            facts,
        )
    word = "blocked" if key.mode is HoldMode.BLOCKED else "parked"
    return Why(
        word,
        f"its key {event.key!r} is {word} by the dead letter {key.head}: {key.error}",
        f"pillarbox dead replay {key.head} --stream {quote(event.stream)}",
        facts,
    )


def _attempt(place: _Place) -> Why | None:
    found, event = place.found, place.found.event
    if event.status is Status.PROCESSING:
        at = _at(found.processing_started_at)
        facts = {"worker": found.lease_owner, "since": at, "lease_until": _at(found.lease_until)}
        if found.lease_until is not None and found.lease_until <= place.now:
            sentence = (
                f"worker {found.lease_owner} took it at {at} and did not renew its lease, so it is about to be rescued"
            )
            return Why("lease_over", sentence, f"pillarbox rescue --stream {quote(event.stream)}", facts)
        sentence = f"worker {found.lease_owner} is processing it since {at}, attempt {event.attempts}"
        return Why("processing", sentence, None, facts)
    if event.status is Status.FAILED:
        return _failed(place, found.next_attempt_at)
    return None


def _failed(place: _Place, due: datetime | None) -> Why:
    found, event = place.found, place.found.event
    when = "soon" if due is None else _when(place, due)
    facts = {
        "attempts": event.attempts,
        "error": found.last_error,
        "next_attempt_at": None if due is None else iso(due),
    }
    at = _at(found.last_error_at)
    # An event whose topic or handler is missing waits without being charged.
    failed = f"attempt {event.attempts} failed at {at}" if event.attempts else f"it has to wait, uncharged, since {at}"
    return Why(
        "failed",
        f"{failed}: {found.last_error}; its next attempt is {when}",
        f"pillarbox events show {event.id} --stream {quote(event.stream)}",
        facts,
    )


async def _queue(store: Desk, place: _Place, wait: Callable[[float], Awaitable[object]] | None) -> Why:
    ahead = await store.ahead(place.found, _COUNTED)
    if place.gauges.mode is not Mode.QUEUE:
        absent = _absent_owner(place, ahead)
        if absent is not None:
            return absent
    speed = ""
    facts: dict[str, Any] = {"before": ahead.events, "owner": ahead.owner}
    if wait is not None and 0 < ahead.events < _COUNTED:
        await wait(_RATE_SECONDS)
        rate = max(0.0, (ahead.events - (await store.ahead(place.found, _COUNTED)).events) / _RATE_SECONDS)
        facts["per_second"] = rate
        speed = (
            f"; its shard publishes about {rate:,.0f} a second"
            if rate
            else "; none of them was published in the last second"
        )
    if not ahead.events:
        sentence = "it is the next event of its shard and about to be published"
        return Why("next", sentence, None, facts)
    more = "at least " if ahead.events >= _COUNTED else ""
    noun = "event comes" if ahead.events == 1 else "events come"
    return Why("behind", f"{more}{ahead.events:,} older {noun} before it{speed}", "pillarbox status", facts)


def _absent_owner(place: _Place, ahead: Ahead) -> Why | None:
    """The shard belongs to a worker that is not live any more."""
    live = {worker.name for worker in place.workers if worker.live}
    if ahead.owner is None or ahead.owner in live:
        return None
    until = iso(place.now + timedelta(seconds=ahead.owned_seconds))
    return Why(
        "owned",
        f"its shard belongs to worker {ahead.owner}, which was not seen lately, until {until}, in "
        f"{ahead.owned_seconds:.0f} s; then another worker takes it over",
        None,
        {"owner": ahead.owner, "lease_until": until},
    )


def _at(value: datetime | None) -> str | None:
    return None if value is None else iso(value)


def _when(place: _Place, due: datetime) -> str:
    return "due now" if due <= place.now else f"at {iso(due)}, in {_left(place, due)}"


def _left(place: _Place, until: datetime) -> str:
    seconds = max(0.0, (until - place.now).total_seconds())
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
