"""What the contract's tests must be able to do to an outbox on SQL."""

from collections.abc import Sequence

from pillarbox.conformance import AuditRow, StoreContract
from pillarbox.store import Store
from pillarbox.stores.sql import SqlStore


class SqlStoreContract(StoreContract):
    async def set_schema_version(self, store: Store, version: int) -> None:
        assert isinstance(store, SqlStore)
        await store._db.execute(store._sql["set_meta"], name="schema_version", value=str(version))

    async def audit(self, store: Store) -> Sequence[AuditRow]:
        assert isinstance(store, SqlStore)
        select = store._statement("SELECT operator, action, stream, event_id FROM {audit} ORDER BY id")
        rows = await store._db.fetch(select)
        return [AuditRow(by, action, stream, store._as_uuid(id)) for by, action, stream, id in rows]
