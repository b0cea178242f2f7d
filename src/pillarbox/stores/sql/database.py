"""The seam between the shared SQL and one driver."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from pillarbox.stores.sql.statements import Statement


class Connection(Protocol):
    """Runs statements: each by itself, or all of them inside one transaction."""

    async def fetch(self, statement: Statement, **values: Any) -> Sequence[Any]: ...
    async def execute(self, statement: Statement, **values: Any) -> int:
        """How many rows were changed."""
        ...

    async def execute_many(self, statement: Statement, rows: Sequence[Mapping[str, Any]]) -> None: ...
    async def run(self, text: str) -> None:
        """A statement of a migration, as it stands."""
        ...


class Database(Connection, Protocol):
    """Opens connections, and maps the driver's errors to StoreDown, StoreError, SchemaError and DuplicateEvent."""

    async def open(self) -> None:
        """Safe to call twice."""
        ...

    async def close(self) -> None: ...
    def transaction(self) -> AbstractAsyncContextManager[Connection]: ...
