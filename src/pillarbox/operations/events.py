"""Finding one event by its id, which may stand in several streams."""

from collections.abc import Sequence
from uuid import UUID

from pillarbox.event import Status
from pillarbox.operations.desk import NotFound, SeveralStreams
from pillarbox.store import Found, Insights


async def find_event(store: Insights, id: UUID, stream: str | None = None) -> Found:
    """The event with its payload and errors, a dead letter too.

    Raises NotFound, or SeveralStreams if no stream is given and several have the id.
    """
    found = await _find(store, id, stream)
    if not found:
        raise NotFound(f"there is no event {_name(id, stream)}; it may have been pruned, see `pillarbox events list`")
    return _only(found)


async def find_dead_letter(store: Insights, id: UUID, stream: str | None = None) -> Found:
    """The dead letter with its payload and errors; events that are not dead do not count."""
    found = await _find(store, id, stream)
    dead = [each for each in found if each.event.status is Status.DEAD]
    if dead:
        return _only(dead)
    if found:
        states = ", ".join(sorted({each.event.status for each in found}))
        raise NotFound(f"event {_name(id, stream)} is {states}, not dead; see `pillarbox events show {id}`")
    raise NotFound(f"there is no event {_name(id, stream)}; `pillarbox dead list` shows the dead letters")


async def _find(store: Insights, id: UUID, stream: str | None) -> list[Found]:
    return [each for each in await store.find_by_id(id) if stream is None or each.event.stream == stream]


def _only(found: Sequence[Found]) -> Found:
    if len(found) > 1:
        raise SeveralStreams({found[0].event.id: [each.event.stream for each in found]})
    return found[0]


def _name(id: UUID, stream: str | None) -> str:
    return str(id) if stream is None else f"{id} in stream {stream!r}"
