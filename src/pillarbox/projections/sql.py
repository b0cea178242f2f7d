"""The upsert on a SQL database."""

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime
from secrets import randbits
from typing import Any, Final

from pillarbox.drivers.contract import Answer, Driver, Statement, Steps
from pillarbox.errors import ConfigError, InvalidEvent
from pillarbox.payload import serialise
from pillarbox.projections.row import Row
from pillarbox.sql.dialects import Dialect

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


def check(row: Row) -> None:
    """Refuse names that are no plain identifiers."""
    parts = row.table.split(".") if isinstance(row.table, str) else [row.table]
    if len(parts) > 2 or not all(_is_name(part) for part in parts):
        raise ConfigError(f"{row.table!r} cannot name a table; use letters, digits and _, or schema.table")
    for column in (*row.key, *row.values, *row.guard):
        if not _is_name(column):
            raise ConfigError(f"{column!r} cannot name a column; use letters, digits and _, and no digit first")


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def upsert(row: Row, driver: Driver) -> Steps[bool]:
    """Write the row. True if it was written."""
    if driver.dialect.database == "mysql":
        return (yield from _upsert_mysql(row, driver.dialect))
    answer: Answer = yield _on_conflict(row, driver.dialect)
    return row.version is None or answer.affected == 1


def _on_conflict(row: Row, dialect: Dialect) -> Statement:
    """For PostgreSQL and SQLite."""
    name = dialect.identifier
    changed = [name(column) for column in (*row.values, *row.guard)]
    text = (
        f"{_insert(row, dialect, ' AS old')} ON CONFLICT ({', '.join(map(name, row.key))}) DO UPDATE SET "
        + ", ".join(f"{column} = excluded.{column}" for column in changed)
    )
    if row.version is not None:
        number, event_id = name(row.version_column), name(row.id_column)
        text += f" WHERE old.{number} IS NULL OR old.{number} < excluded.{number}"
        if row.version.id is not None:
            later = f"old.{event_id} IS NULL OR old.{event_id} < excluded.{event_id}"
            text += f" OR (old.{number} = excluded.{number} AND ({later}))"
    return Statement(text, _cells(row, dialect))


def _upsert_mysql(row: Row, dialect: Dialect) -> Steps[bool]:
    """For MySQL and MariaDB, whose ON DUPLICATE KEY UPDATE has no condition: each column keeps its value or gets its
    new one.

    Assignments run from left to right, and all at once under MariaDB's SIMULTANEOUS_ASSIGNMENT. So the version comes
    last, and before it the id: no condition reads a column that is assigned before it. The new values are bound twice,
    because VALUES() is deprecated on MySQL, and MariaDB does not know its successor.
    """
    name = dialect.identifier
    new = {column: _cell(value, dialect) for column, value in {**row.values, **row.guard}.items()}
    text = f"{_insert(row, dialect)} ON DUPLICATE KEY UPDATE "
    if row.version is None:
        text += ", ".join(f"{name(column)} = %s" for column in new)
        yield Statement(text, [*_cells(row, dialect), *new.values()])
        return True
    number, event_id = name(row.version_column), name(row.id_column)
    grown, compared = f"{number} IS NULL OR {number} < %s", [row.version.number]
    newer, newer_than = grown, compared
    if row.version.id is not None:
        newer = f"{grown} OR ({number} = %s AND ({event_id} IS NULL OR {event_id} < %s))"
        newer_than = [*compared, row.version.number, new[row.id_column]]
    others = [column for column in (*row.values, *row.guard) if column != row.version_column]
    text += "".join(f"{name(column)} = IF({newer}, %s, {name(column)}), " for column in others)
    # A client can ask for found rows, as SQLAlchemy and Django do: then an insert and an update that changes nothing
    # both count 1. The mark tells them apart.
    mark = randbits(62)
    text += f"{number} = IF({grown}, %s, IF(LAST_INSERT_ID(%s) = 0, {number}, {number}))"
    values = [*_cells(row, dialect), *(cell for column in others for cell in (*newer_than, new[column]))]
    answer: Answer = yield Statement(text, [*values, *compared, row.version.number, mark])
    if answer.affected != 1:
        return answer.affected > 1
    marked: Answer = yield Statement("SELECT LAST_INSERT_ID()", has_rows=True)
    return bool(marked.rows[0][0] != mark)


def _insert(row: Row, dialect: Dialect, alias: str = "") -> str:
    cells = {**row.key, **row.values, **row.guard}
    marks = [
        # A driver may have a codec for JSON, which would encode the text again. The column can be text too.
        f"CAST(CAST({mark} AS text) AS jsonb)" if dialect.database == "postgresql" and _is_json(cell) else mark
        for mark, cell in zip(dialect.marks(len(cells)), cells.values(), strict=True)
    ]
    table = ".".join(map(dialect.identifier, row.table.split(".")))
    columns = ", ".join(map(dialect.identifier, cells))
    return f"INSERT INTO {table}{alias} ({columns}) VALUES ({', '.join(marks)})"


def _cells(row: Row, dialect: Dialect) -> Sequence[Any]:
    return [_cell(value, dialect) for value in (*row.key.values(), *row.values.values(), *row.guard.values())]


def _is_json(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _cell(value: Any, dialect: Dialect) -> Any:
    """The value as the driver takes it; None and what is not named here as it is."""
    if _is_json(value):
        try:
            return serialise(value)[0].decode()
        except InvalidEvent:
            raise ConfigError("a value is no JSON; pass plain data without NaN, or text") from None
    if dialect.cell is None:
        return value
    if isinstance(value, datetime):
        if value.utcoffset() is None and dialect.database != "postgresql":
            # Written as it is: without this, it would be taken for local time.
            value = value.replace(tzinfo=UTC)
    elif isinstance(value, date) and dialect.database == "sqlite":
        return value.isoformat()
    return dialect.cell(value)
