"""Finding one event by its id, which may stand in several streams, and publishing published events again."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final
from uuid import UUID

from pillarbox.event import Status
from pillarbox.operations.desk import Desk, NotFound, SeveralStreams
from pillarbox.store import Filter, Found, Insights, Ref

_STEP: Final = 1000
REPLAYED: Final = "replay published"  # in the audit


async def find_event(store: Insights, id: UUID, stream: str | None = None) -> Found:
    """The event with its payload and errors, a dead letter too.

    Raises NotFound, or SeveralStreams if no stream is given and several have the id.
    """
    found = await _find(store, id, stream)
    if not found:
        raise NotFound(f"there is no event {_name(id, stream)}; it may have been pruned, see `pillarbox events list`")
    return _only(found)


async def find_dead_letter(store: Desk, id: UUID, stream: str | None = None, consumer: str = "") -> Found:
    """The dead letter of a relay, or of this consumer, with its payload and errors; events that are not dead do not
    count."""
    found = await _find(store, id, stream, consumer)
    dead = [each for each in found if each.event.status is Status.DEAD]
    if dead:
        return _only(dead)
    others = [name for name in ["", *sorted(await store.dead_consumers())] if name != consumer]
    for other in others:
        if any(each.event.status is Status.DEAD for each in await _find(store, id, stream, other)):
            place = f"consumer {other!r}; add --consumer {other}" if other else "a relay; leave out --consumer"
            raise NotFound(f"event {_name(id, stream)} is a dead letter of {place}")
    if found:
        states = ", ".join(sorted({each.event.status for each in found}))
        raise NotFound(f"event {_name(id, stream)} is {states}, not dead; see `pillarbox events show {id}`")
    raise NotFound(f"there is no event {_name(id, stream)}; `pillarbox dead list` shows the dead letters")


async def published(store: Desk, where: Filter, *, skip_since: datetime | None = None) -> AsyncIterator[Found]:
    """Every published event that matches, stream by stream, in order of their ids. Instants are of the writing.

    skip_since: without those that operators have replayed at this instant or later, as the audit says."""
    streams = [where.stream] if where.stream is not None else [each.stream for each in await store.gauges(1)]
    for stream in streams:
        again = set() if skip_since is None else await _replayed(store, stream, skip_since)
        chosen = replace(where, stream=stream, status=Status.PUBLISHED)
        after: UUID | None = None
        while page := await store.find(chosen, _STEP, newest_first=False, after=after):
            for each in page:
                if each.event.id not in again:
                    yield each
            after = page[-1].event.id


async def replay_published(
    store: Desk,
    where: Filter,
    by: str,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    skip_since: datetime | None = None,
) -> int:
    """Publish published events again, in their old order; returns their number.

    Only those that are published when it begins: what a relay publishes meanwhile is not replayed again. They enter at
    the end of their streams in steps of 1,000, each with its rows in the audit. ``on_progress`` gets the number that
    are done so far, and of how many. skip_since: as in ``published``: the rest of a replay that was interrupted."""
    found = published(store, where, skip_since=skip_since)
    chosen = sorted([(each.event.stream, each.event.seq, each.event.id) async for each in found])
    done = 0
    for start in range(0, len(chosen), _STEP):
        refs = [Ref(event_id, stream) for stream, _, event_id in chosen[start : start + _STEP]]
        done += await store.replay_published(refs, by)
        if on_progress is not None:
            on_progress(done, len(chosen))
    return done


async def _replayed(store: Desk, stream: str, since: datetime) -> set[UUID | None]:
    """The events of a stream that operators have replayed since then."""
    since = since.replace(microsecond=0)  # MongoDB's audit has whole seconds
    limit = _STEP
    while True:
        rows = await store.audit(limit, stream, REPLAYED)
        if len(rows) < limit or rows[-1].at < since:
            return {row.event_id for row in rows if row.at >= since}
        limit *= 10


async def _find(store: Insights, id: UUID, stream: str | None, consumer: str = "") -> list[Found]:
    found = await store.find_by_id(id, consumer)
    return [each for each in found if stream is None or each.event.stream == stream]


def _only(found: Sequence[Found]) -> Found:
    if len(found) > 1:
        raise SeveralStreams({found[0].event.id: [each.event.stream for each in found]})
    return found[0]


def _name(id: UUID, stream: str | None) -> str:
    return str(id) if stream is None else f"{id} in stream {stream!r}"
