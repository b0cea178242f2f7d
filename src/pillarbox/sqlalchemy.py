"""The events of an outbox as a table of SQLAlchemy, for an application's own queries."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Dialect,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    Uuid,
)
from sqlalchemy.dialects.mysql import DATETIME
from sqlalchemy.types import BINARY, TypeEngine

from pillarbox.outbox import Outbox
from pillarbox.sql.cells import mysql_cell, sqlite_cell


def event_table(outbox: Outbox, metadata: MetaData | None = None) -> Table:
    """The table of an outbox's events, with the columns of an event and those of its delivery.

    metadata: default a new one, which Alembic's autogenerate does not see. The table is for reading: what you write
    through it is neither checked nor safe from the relay.
    """
    names = outbox._names
    return Table(
        f"{names.prefix}_event",
        MetaData() if metadata is None else metadata,
        Column("seq", BigInteger),
        Column("id", _Id, primary_key=True),
        Column("stream", String(100), primary_key=True),
        *(Column(name, Text) for name in ("tenant", "topic", "type", "aggregate_type", "aggregate_id")),
        Column("aggregate_version", BigInteger),
        *(Column(name, Text) for name in ("key", "routing_key", "content_type", "headers")),
        *(Column(name, Text) for name in ("schema_id", "schema_version", "status", "last_error")),
        Column("payload", LargeBinary),
        *(Column(name, Integer) for name in ("attempts", "max_attempts")),
        *(Column(name, _Instant) for name in ("occurred_at", "created_at", "available_at")),
        *(Column(name, _Instant) for name in ("next_attempt_at", "published_at", "last_error_at")),
        schema=names.schema,
    )


class _Id(TypeDecorator[UUID]):
    """A UUID in the form that the outbox's tables have on each database."""

    impl = Uuid
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        forms: dict[str, TypeEngine[Any]] = {"postgresql": Uuid(), "sqlite": String(36)}
        return dialect.type_descriptor(forms.get(dialect.name, BINARY(16)))

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        value = UUID(value) if isinstance(value, str) else value
        return _cell(value, dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> UUID | None:
        if value is None or isinstance(value, UUID):
            return value
        return UUID(value) if isinstance(value, str) else UUID(bytes=bytes(value))


class _Instant(TypeDecorator[datetime]):
    """An aware datetime, which only PostgreSQL has."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        forms: dict[str, TypeEngine[Any]] = {"postgresql": DateTime(timezone=True), "sqlite": String(26)}
        return dialect.type_descriptor(forms.get(dialect.name, DATETIME(fsp=6)))

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return _cell(value, dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


def _cell(value: Any, dialect: Dialect) -> Any:
    if dialect.name == "postgresql":
        return value
    return (sqlite_cell if dialect.name == "sqlite" else mysql_cell)(value)
