"""Shared by the SQL stores: one part for each contract, made of named statements."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pillarbox.sql.rows import Rows
from pillarbox.sql.statements import Statements
from pillarbox.store import Claims, Features, Retention, Serving, Turns
from pillarbox.stores.composed import ComposedStore
from pillarbox.stores.outbox_info import OutboxInfo
from pillarbox.stores.sql.claims import SqlClaims
from pillarbox.stores.sql.consumers import SqlConsumers
from pillarbox.stores.sql.database import Connection, Database
from pillarbox.stores.sql.examined import Server, SqlExamined, no_server
from pillarbox.stores.sql.gauges import SqlGauges
from pillarbox.stores.sql.insights import SqlInsights
from pillarbox.stores.sql.operations import SqlOperator, SqlRetention, SqlWriting
from pillarbox.stores.sql.schema import SqlSchema
from pillarbox.stores.sql.serving import SqlServing

__all__ = ["SHARED", "Connection", "Database", "SqlStore"]

SHARED: Final = __package__  # the statements that are the same on every database


class SqlStore(ComposedStore):
    """An outbox in a SQL database. A database can replace a part by its own.

    ``database``, ``statements`` and ``outbox`` are for tests and tools."""

    features = Features()

    def __init__(
        self,
        database: Database,
        statements: Statements,
        outbox: OutboxInfo,
        rows: Rows,
        *,
        schema: SqlSchema,
        turns: Turns,
        serving: Serving | None = None,
        claims: Claims | None = None,
        retention: Retention | None = None,
        server: Server = no_server,
        written: Mapping[str, str] = MappingProxyType({}),
        read: Sequence[str] = (),
    ) -> None:
        insights = SqlInsights(database, statements, rows)
        super().__init__(
            database,
            outbox,
            serving=serving or SqlServing(database, statements, outbox),
            turns=turns,
            claims=claims or SqlClaims(database, statements, rows),
            consumers=SqlConsumers(database, statements, rows),
            retention=retention or SqlRetention(database, statements),
            operator=SqlOperator(database, statements),
            insights=insights,
            examined=SqlExamined(database, statements, server, written, read),
            gauges=SqlGauges(database, statements, rows, outbox, insights),
            writing=SqlWriting(database, statements),
            schema=schema,
        )
        self.database, self.statements = database, statements
