"""The dialects that drivers speak: a database, its parameters and its errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from sqlite3 import OperationalError
from typing import Any, Final, Literal, TypeAlias

from pillarbox.sql.cells import mysql_cell, sqlite_cell, text_id_cell

DatabaseName: TypeAlias = Literal["postgresql", "mysql", "sqlite"]


class ErrorKind(Enum):
    """The errors of a database that a feature has an answer for."""

    DUPLICATE = "duplicate"  # a row with this unique key exists
    NO_TABLE = "no table"
    CONFLICT = "conflict"  # the transaction lost against another one; run again, it may win
    AWAY = "away"  # the connection is lost, or the server takes none
    OTHER = "other"


@dataclass(frozen=True, eq=False)
class Dialect:
    """A database as one kind of driver sees it. MariaDB's is ``mysql``."""

    database: DatabaseName
    mark: str  # of a parameter: "?", "%s", or "$" with its number
    cell: Callable[[Any], Any] | None  # turns ids and instants into parameters; None: the driver takes them as they are
    classify: Callable[[BaseException], ErrorKind]

    def marks(self, count: int, start: int = 1) -> Sequence[str]:
        """The marks of ``count`` parameters, the first of which has the number ``start``."""
        if self.mark == "$":
            return [f"${number}" for number in range(start, start + count)]
        return [self.mark] * count

    def identifier(self, name: str) -> str:
        """A plain name in quotes: any word of the language can be one, and its case counts."""
        return f"`{name}`" if self.database == "mysql" else f'"{name}"'

    def quoted(self, column: str) -> str:
        """The column as it can stand in a statement: ``key`` is a word of MySQL."""
        return f"`{column}`" if self.database == "mysql" and column == "key" else column


def _classify_postgres(error: BaseException) -> ErrorKind:
    # psycopg and asyncpg say sqlstate, psycopg2 pgcode, pg8000 has the fields of the protocol.
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if code is None and error.args and isinstance(error.args[0], dict):
        code = error.args[0].get("C")
    code = str(code)
    return _POSTGRES_ERRORS.get(code, ErrorKind.AWAY if code.startswith("08") else ErrorKind.OTHER)


def _classify_mysql(error: BaseException) -> ErrorKind:
    # An error of the application may have a number too.
    if not any(each.__name__ in ("Error", "MySQLError") for each in type(error).__mro__):
        return ErrorKind.OTHER
    code = error.args[0] if error.args else None
    return _MYSQL_ERRORS.get(code, ErrorKind.OTHER) if isinstance(code, int) else ErrorKind.OTHER


def _classify_sqlite(error: BaseException) -> ErrorKind:
    text = str(error)
    if text.startswith("UNIQUE constraint failed"):
        return ErrorKind.DUPLICATE
    if not isinstance(error, OperationalError):
        return ErrorKind.OTHER
    if text.startswith("no such table"):
        return ErrorKind.NO_TABLE
    return ErrorKind.CONFLICT if "is locked" in text else ErrorKind.OTHER


_POSTGRES_ERRORS: Final = {
    "23505": ErrorKind.DUPLICATE,
    "42P01": ErrorKind.NO_TABLE,
    **dict.fromkeys(("40001", "40P01", "55P03"), ErrorKind.CONFLICT),  # serialisation, deadlock, wait for a lock
    **dict.fromkeys(("57P01", "57P02", "57P03", "57P05"), ErrorKind.AWAY),  # the server stops, crashed or starts
}
_MYSQL_ERRORS: Final = {
    1062: ErrorKind.DUPLICATE,
    1146: ErrorKind.NO_TABLE,
    # Wait for a lock, deadlock, a row that changed since the snapshot, NOWAIT.
    **dict.fromkeys((1205, 1213, 1020, 3572), ErrorKind.CONFLICT),
    # The server stops, the connection is killed, refused, gone, lost, killed for its idleness.
    **dict.fromkeys((0, 1053, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031), ErrorKind.AWAY),
}

POSTGRES: Final = Dialect("postgresql", "%s", text_id_cell, _classify_postgres)
POSTGRES_NUMBERED: Final = Dialect("postgresql", "$", None, _classify_postgres)
MYSQL: Final = Dialect("mysql", "%s", mysql_cell, _classify_mysql)
SQLITE: Final = Dialect("sqlite", "?", sqlite_cell, _classify_sqlite)
SQLITE_FORMAT: Final = Dialect("sqlite", "%s", sqlite_cell, _classify_sqlite)  # Django's cursor
