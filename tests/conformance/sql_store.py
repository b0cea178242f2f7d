"""What the contract's tests must be able to do to an outbox on SQL."""

from pillarbox.conformance import StoreContract
from pillarbox.conformance.probes import probe_of
from pillarbox.event import Event
from pillarbox.store import Store


class SqlStoreContract(StoreContract):
    async def set_schema_version(self, store: Store, version: int) -> None:
        await probe_of(store).set_schema_version(version)

    async def damage(self, store: Store, event: Event, how: str) -> None:
        await probe_of(store).damage(event, how)

    async def remember(self, store: Store, table: str, count: int) -> None:
        await probe_of(store).remember(table, count)
