"""What the contract's tests must be able to do to an outbox on SQL."""

from pillarbox.conformance import StoreContract
from pillarbox.store import Store
from pillarbox.stores.sql import SqlStore


class SqlStoreContract(StoreContract):
    async def set_schema_version(self, store: Store, version: int) -> None:
        assert isinstance(store, SqlStore)
        await store._db.execute(store._sql["set_meta"], name="schema_version", value=str(version))
