"""What all SQL stores share: the contract in terms of shared statements, and a seam over the driver."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from pillarbox.event import Event
from pillarbox.names import Names
from pillarbox.store import Features
from pillarbox.stores.sql.database import Connection, Database
from pillarbox.stores.sql.operations import OperationsPart
from pillarbox.stores.sql.rows import write_row
from pillarbox.stores.sql.statements import Dialect, Statement

__all__ = ["Connection", "Database", "Dialect", "Names", "SqlStore", "Statement"]


class SqlStore(OperationsPart):
    """A store on a SQL database: a subclass brings the dialect, the driver and what is faster there in another way."""

    features = Features()

    def __init__(self, database: Database, names: Names, *, shards: int = 16, description: str = "") -> None:
        super().__init__(database, names, shards=shards, description=description)
        self._announced = set()
        self._polls = {}

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._db.transaction()

    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        rows = [write_row(event) for event in events]
        if tx is not None:
            await tx.execute_many(self._sql["add"], rows)
            return
        async with self._db.transaction() as own:
            await own.execute_many(self._sql["add"], rows)
