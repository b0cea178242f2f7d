"""A temporary outbox beside those of the user."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

from pillarbox.errors import PillarboxError
from pillarbox.store import Store
from pillarbox.tasks import run_to_completion

# The whole name must match, so that a user's own outbox bench_something is never removed.
_PREFIX: Final = re.compile(r"bench_[0-9a-f]{8}")
_REMOVE_SECONDS: Final = 60.0


class BenchFailed(PillarboxError):
    """A bench that could not be completed."""


Make: TypeAlias = Callable[[str], Store]  # a store on the outbox of that prefix


@asynccontextmanager
async def own_outbox(make: Make) -> AsyncIterator[tuple[Store, Store]]:
    """A new outbox, as two stores: one for the writer and one for the relay. The end of the block removes it."""
    prefix = f"bench_{secrets.token_hex(4)}"
    writer, store = make(prefix), make(prefix)
    try:
        # If it were cancelled half-way, a statement on its way to the server could make a table after the removal.
        await run_to_completion(writer.migrate())
        await writer.open()
        await store.open()
        yield writer, store
    finally:
        await store.close()
        await _remove(writer, prefix)


async def _remove(store: Store, prefix: str) -> None:
    try:
        async with asyncio.timeout(_REMOVE_SECONDS):
            await store.remove()
    except (PillarboxError, TimeoutError, asyncio.CancelledError) as error:
        why = {TimeoutError: f"it took more than {_REMOVE_SECONDS:.0f} s", asyncio.CancelledError: "interrupted"}
        raise BenchFailed(
            f"the outbox '{prefix}' is left in {store.description} ({why.get(type(error), error)}); "
            "remove it with `pillarbox bench --clean`"
        ) from error
    finally:
        await store.close()


async def remains(make: Make) -> Sequence[str]:
    """The prefixes of outboxes that killed runs have left, and of runs that are going on now."""
    store = make("bench")
    try:
        return [prefix for prefix in await store.prefixes() if _PREFIX.fullmatch(prefix)]
    finally:
        await store.close()


async def clean(make: Make, prefixes: Sequence[str]) -> Sequence[str]:
    """Remove these outboxes. Returns those that existed."""
    removed = []
    for prefix in prefixes:
        store = make(prefix)
        try:
            if await store.remove():
                removed.append(prefix)
        finally:
            await store.close()
    return removed
