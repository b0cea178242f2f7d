"""The tables of an outbox in an application's own Alembic migrations."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from alembic.util import CommandError
from sqlalchemy import BigInteger, Connection, inspect
from sqlalchemy.dialects.postgresql.base import ischema_names

from pillarbox.drivers import driver_of
from pillarbox.drivers.contract import Feature
from pillarbox.errors import ConfigError, PillarboxError, SchemaError
from pillarbox.names import TABLES, Names
from pillarbox.sql.migrations import COLLATIONS, Migration, migrations, script

if TYPE_CHECKING:
    from alembic.migration import MigrationContext

_FOLDERS: Final = {"postgresql": "postgres", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
_MIGRATION: Final = Feature(
    "a migration that fails would leave half of the tables",
    "pass alembic's op",
    "pass alembic's op",
)


class MigrationError(SchemaError, CommandError):
    """A migration cannot run here. The command ``alembic`` prints it as one line."""


@contextmanager
def _for_alembic() -> Iterator[None]:
    try:
        yield
    except PillarboxError as error:
        raise MigrationError(str(error)) from error


class Operations(Protocol):
    """What is used of ``alembic.op``."""

    def get_bind(self) -> Connection: ...

    def get_context(self) -> "MigrationContext": ...


@_for_alembic()
def migrate_outbox(
    op: Operations,
    version: int,
    *,
    after: int = 0,
    prefix: str = "outbox",
    schema: str | None = None,
    shards: int = 16,
) -> None:
    """Bring an outbox from schema version ``after`` to ``version``, in the migration's own transaction.

    version, after: fixed numbers, so that the migration does the same in every release; ``after`` is 0 where the tables
    are made. prefix, schema: where its tables are. shards: of a new outbox.
    """
    names, context = Names(prefix, schema), op.get_context()
    if not 1 <= shards <= 1024:
        raise ConfigError(f"shards {shards} is out of range; use 1 to 1024 (16 serves most)")
    steps = _steps(context, names, shards)
    newest = steps[-1].number
    if not 0 <= after < version <= newest:
        raise SchemaError(
            f"a migration from version {after} to {version} is not known: this release has the versions 1 to {newest}, "
            "and version has to be above after; correct them, or install the release that the migration was written for"
        )
    if not context.as_sql:
        _check(op.get_bind(), names, after)
    chosen = [step for step in steps if after < step.number <= version]
    _run(op, script(chosen, names.parts["meta"], None if after else shards))


@_for_alembic()
def drop_outbox(op: Operations, *, prefix: str = "outbox", schema: str | None = None, pending: bool = False) -> None:
    """Drop an outbox with all its tables: for a downgrade to a revision that had none. Stop relays and writers first.

    pending: drop it also if events wait in it, which are then lost.
    """
    names, context = Names(prefix, schema), op.get_context()
    if not context.as_sql:
        connection = op.get_bind()
        _check_transaction(connection)
        if _version(connection, names) is None:
            raise SchemaError(f"there is no outbox '{prefix}' to drop; correct the prefix, or the schema")
        waiting = f"SELECT 1 FROM {names.parts['event']} WHERE status <> 'published' LIMIT 1"
        if not pending and connection.exec_driver_sql(waiting).first():
            raise SchemaError(
                f"events wait in the outbox '{prefix}' and would be lost; publish them with `pillarbox relay --drain`, "
                "or drop them too with drop_outbox(op, pending=True)"
            )
    # The table that marks an outbox goes last: an interrupted downgrade can be run again.
    lines = [f"DROP TABLE IF EXISTS {names.parts[name]}" for name in reversed(TABLES)]
    if context.dialect.name == "postgresql":
        lines.append(f"DROP FUNCTION IF EXISTS {names.parts['wake']}()")
    _run(op, lines)


def without_outbox(
    include_name: Callable[[str | None, Any, Any], bool] | None = None, *, prefix: str = "outbox"
) -> Callable[[str | None, Any, Any], bool]:
    """For ``context.configure(include_name=...)`` in ``env.py``: autogenerate then does not see the outbox's tables.

    include_name: a function of your own, which is asked about everything else. prefix: that of the outbox.
    """
    tables: Collection[str] = {f"{prefix}_{name}" for name in TABLES}
    # Alembic reads all tables where none is left to compare, and SQLAlchemy warns of types that it does not know.
    ischema_names.setdefault("xid8", BigInteger)

    def include(name: str | None, type_: Any, parent_names: Mapping[Any, str | None]) -> bool:
        if type_ == "table" and name in tables:
            return False
        return include_name is None or include_name(name, type_, parent_names)

    return include


def _steps(context: "MigrationContext", names: Names, shards: int) -> list[Migration]:
    dialect = context.dialect
    folder = _FOLDERS.get(dialect.name)
    if folder is None:
        raise ConfigError(f"there is no outbox for {dialect.name}; use PostgreSQL, MySQL, MariaDB or SQLite")
    if names.schema is not None and folder != "postgres":
        raise ConfigError(f"schema is for PostgreSQL; on {dialect.name} leave it out")
    collation = COLLATIONS["MariaDB" if getattr(dialect, "is_mariadb", False) else "MySQL"]
    return list(migrations(folder, {**names.parts, "collation": collation, "shards": shards}))


def _check(connection: Connection, names: Names, after: int) -> None:
    _check_transaction(connection)
    version = _version(connection, names) or 0
    if version == after:
        return
    outbox = f"the outbox '{names.prefix}'"
    if not after:
        raise SchemaError(
            f"{outbox} is there already, with version {version}, made by `pillarbox init` or another migration; mark "
            "this one as done with `alembic stamp`, or give the new outbox another prefix"
        )
    raise SchemaError(
        f"this migration brings {outbox} from version {after} on, and it has version {version}; put the migrations in "
        "order with down_revision"
    )


def _check_transaction(connection: Connection) -> None:
    # Elsewhere each change of a schema commits by itself anyway.
    if connection.dialect.name == "postgresql":
        driver_of(connection).check(_MIGRATION)


def _version(connection: Connection, names: Names) -> int | None:
    """The version of an outbox's tables; None: there are none."""
    table, schema = f"{names.prefix}_meta", names.schema
    if connection.dialect.name == "postgresql":  # which knows names without quotes in small letters
        table, schema = table.lower(), schema and schema.lower()
    if not inspect(connection).has_table(table, schema=schema):
        return None
    found = connection.exec_driver_sql(
        f"SELECT value FROM {names.parts['meta']} WHERE name = 'schema_version'"
    ).scalar_one_or_none()
    return int(found or 0)


def _run(op: Operations, lines: list[str]) -> None:
    context = op.get_context()
    if context.as_sql:
        for line in lines:
            context.impl.static_output(line + context.impl.command_terminator)
        return
    connection = op.get_bind()
    for line in lines:
        # Not as a text of SQLAlchemy, nor with parameters: colons and percent signs are the statement's own.
        connection.exec_driver_sql(line, execution_options={"no_parameters": True})
