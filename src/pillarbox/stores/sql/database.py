"""The seam between the shared SQL and one driver."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from pillarbox.errors import SchemaError
from pillarbox.sql.statements import SqlText

T = TypeVar("T")


class NoDatabase(SchemaError):
    """The file of the database does not exist."""


class Connection(Protocol):
    """Runs statements: each by itself, or all of them inside one transaction."""

    async def fetch(self, statement: SqlText, **values: Any) -> Sequence[Any]: ...

    async def execute(self, statement: SqlText, **values: Any) -> int:
        """Run a statement; returns the number of changed rows."""
        ...

    async def execute_many(self, statement: SqlText, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run a statement once for each row, in their order."""

    async def run(self, text: str) -> None:
        """Run a text without parameters, for example of a migration."""


class Database(Connection, Protocol):
    """Opens connections, and maps the driver's errors to StoreDown, StoreError, SchemaError and DuplicateEvent."""

    url: str  # with its secrets; empty: the connections are the application's
    can_skip_locked: (
        bool  # whether an UPDATE can pass over rows that another transaction has locked, or nobody locks rows
    )

    async def open(self, *, create: bool = False) -> None:
        """Safe to call twice. ``create``: make the file of a database that is a file."""

    async def close(self) -> None: ...

    def transaction(self) -> AbstractAsyncContextManager[Connection]: ...

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run ``work`` in one transaction, and again after a conflict with another one."""
        ...
