"""Replay and discard of dead letters, by filter and in order."""

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from pillarbox.operations.desk import Desk, SeveralStreams
from pillarbox.store import Filter, Found, Insights, Ref

_CHUNK: Final = 500


class Decided(NamedTuple):
    """The result of a replay or a discard: dead letters changed, and ids of the filter that are no dead letters."""

    changed: int
    missing: Sequence[UUID]


async def find_all_dead(store: Insights, where: Filter) -> list[Found]:
    """Every dead letter that a replay or discard by this filter would change, in order of seq."""
    await _refuse_several_streams(store, where)
    return [each async for page in _pages(store, where) for each in page]


async def count_dead(store: Insights, where: Filter) -> int:
    """The number of dead letters that a replay or discard by this filter would change."""
    await _refuse_several_streams(store, where)
    return sum([len(page) async for page in _pages(store, where)])


async def replay(store: Desk, where: Filter, by: str, on_progress: Callable[[int], None] | None = None) -> Decided:
    """Give dead letters another run of attempts. ``on_progress`` gets the number that are done so far.

    Raises SeveralStreams if the filter has ids but no stream, and an id is a dead letter of several streams.
    """
    return await _decide(store, store.replay, where, by, on_progress)


async def discard(store: Desk, where: Filter, by: str, on_progress: Callable[[int], None] | None = None) -> Decided:
    """Give up dead letters for good. Otherwise as ``replay``."""
    return await _decide(store, store.discard, where, by, on_progress)


async def _decide(
    store: Desk,
    change: Callable[[Sequence[Ref], str], Awaitable[int]],
    where: Filter,
    by: str,
    on_progress: Callable[[int], None] | None,
) -> Decided:
    await _refuse_several_streams(store, where)
    met: set[UUID] = set()
    changed = 0

    async def decide_on(refs: Sequence[Ref]) -> None:
        nonlocal changed
        if refs:
            changed += await change(refs, by)
            met.update(ref.id for ref in refs)
            if on_progress is not None:
                on_progress(changed)

    # A letter that its key waits for comes last of its key: it releases the key, and a letter that came back after it
    # could be overtaken by events that were written since.
    heads: list[Ref] = []
    async for page in _pages(store, where):
        heads += [_ref(each) for each in page if each.holds_key]
        await decide_on([_ref(each) for each in page if not each.holds_key])
    for start in range(0, len(heads), _CHUNK):
        # Together with the events that a relay has parked meanwhile.
        parked = [_ref(each) async for page in _pages(store, where) for each in page if not each.holds_key]
        await decide_on([*parked, *heads[start : start + _CHUNK]])
    return Decided(changed, [each for each in where.ids or () if each not in met])


async def _pages(store: Insights, where: Filter) -> AsyncIterator[Sequence[Found]]:
    after = 0
    while page := await store.find_dead(where, _CHUNK, after):
        yield page
        # A short page is the last one: new deaths would keep this going for as long as someone writes.
        if len(page) < _CHUNK:
            return
        after = page[-1].event.seq


async def _refuse_several_streams(store: Insights, where: Filter) -> None:
    if not where.ids or where.stream is not None:
        return
    streams: dict[UUID, list[str]] = defaultdict(list)
    async for page in _pages(store, where):
        for found in page:
            streams[found.event.id].append(found.event.stream)
    several = {id: names for id, names in streams.items() if len(names) > 1}
    if several:
        raise SeveralStreams(several)


def _ref(found: Found) -> Ref:
    return Ref(found.event.id, found.event.stream, found.consumer)
