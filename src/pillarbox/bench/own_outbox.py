"""An outbox that is there for a while, beside those of the user."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol, TypeAlias

from pillarbox.errors import PillarboxError
from pillarbox.store import Store
from pillarbox.tasks import to_its_end

# A whole name, so that nothing that a user has called bench_something is ever taken for one of these.
_PREFIX: Final = re.compile(r"bench_[0-9a-f]{8}")
_REMOVE_SECONDS: Final = 60.0


class BenchFailed(PillarboxError):
    """A measurement that could not be brought to its end."""


class OwnStore(Store, Protocol):
    """A store whose outbox can be removed."""

    async def remove(self) -> bool: ...
    async def prefixes(self) -> Sequence[str]: ...
    async def server_version(self) -> str: ...


Make: TypeAlias = Callable[[str], OwnStore]  # a store on the outbox of that prefix


@asynccontextmanager
async def own_outbox(make: Make) -> AsyncIterator[tuple[OwnStore, OwnStore]]:
    """An outbox of a new name, as an application and as a relay see it; it is gone at the end of the block."""
    prefix = f"bench_{secrets.token_hex(4)}"
    writer, store = make(prefix), make(prefix)
    try:
        # Called back half-way, a statement that is on its way to the server could make a table after the removal.
        await to_its_end(writer.migrate())
        await writer.open()
        await store.open()
        yield writer, store
    finally:
        await store.close()
        await _remove(writer, prefix)


async def _remove(store: OwnStore, prefix: str) -> None:
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
    """The prefixes of outboxes that runs which were killed have left; also of one that runs at this moment."""
    store = make("bench")
    try:
        return [prefix for prefix in await store.prefixes() if _PREFIX.fullmatch(prefix)]
    finally:
        await store.close()


async def clean(make: Make, prefixes: Sequence[str]) -> Sequence[str]:
    """Remove these; those that were there."""
    removed = []
    for prefix in prefixes:
        store = make(prefix)
        try:
            if await store.remove():
                removed.append(prefix)
        finally:
            await store.close()
    return removed
