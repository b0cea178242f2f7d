"""The operation of our migrations: it runs the same files as ``pillarbox init``."""

from collections.abc import Sequence
from typing import Any, Final

from django.db import router
from django.db.migrations.operations.base import Operation

from pillarbox.django.configuration import configuration
from pillarbox.errors import SchemaError
from pillarbox.names import TABLES
from pillarbox.sql.migrations import COLLATIONS, Migration, migrations

_FOLDERS: Final = {"postgresql": "postgres", "mysql": "mysql", "sqlite": "sqlite"}
_HAS_TABLE: Final = {
    "postgresql": "SELECT 1 WHERE to_regclass(%s) IS NOT NULL",
    "mysql": "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s",
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = %s",
}


class RunSchema(Operation):
    """Brings the tables to this version of the schema. Tables that ``pillarbox init`` made are kept as they are."""

    reversible = True
    reduces_to_sql = True

    def __init__(self, number: int) -> None:
        self.number = number

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The models are not managed."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        connection = schema_editor.connection
        if not router.allow_migrate(connection.alias, app_label):
            return
        steps = {step.number: step for step in _steps(connection)}
        if not schema_editor.collect_sql:
            version = _version(connection)
            if version > max(steps):
                raise SchemaError(
                    f"the outbox in the database {connection.alias!r} has schema version {version}, this release knows "
                    f"only {max(steps)}; install a newer pillarbox"
                )
            if version >= self.number:
                return
            if version < self.number - 1:
                raise SchemaError(
                    f"the outbox in the database {connection.alias!r} has schema version {version}, and this migration "
                    f"needs {self.number - 1}; run the migrations of pillarbox in order and without --fake: "
                    f"`manage.py migrate --fake pillarbox {version or 'zero'}`, then `manage.py migrate pillarbox`"
                )
        for statement in [*steps[self.number].statements, *_marks(self.number)]:
            schema_editor.execute(statement.strip(), params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        connection = schema_editor.connection
        if self.number > 1 or not router.allow_migrate(connection.alias, app_label):
            return  # a later version only adds, and the first one goes with all that belongs to it
        parts = configuration().names.parts
        for name in reversed(TABLES):
            if schema_editor.collect_sql or _has(connection, parts[name]):
                schema_editor.execute(f"DROP TABLE {parts[name]}", params=None)
        if connection.vendor == "postgresql":
            schema_editor.execute(f"DROP FUNCTION IF EXISTS {parts['wake']}()", params=None)

    def describe(self) -> str:
        return f"Brings the tables of the outbox to version {self.number}"

    @property
    def migration_name_fragment(self) -> str:
        return f"outbox_{self.number}"


def _steps(connection: Any) -> Sequence[Migration]:
    chosen = configuration()
    folder = _FOLDERS.get(connection.vendor)
    if folder is None:
        raise SchemaError(
            f"the database {connection.alias!r} is of {connection.vendor}, which Pillarbox does not know; keep the app "
            "'pillarbox' off it with allow_migrate of a database router"
        )
    parts = {**chosen.names.parts, "shards": chosen.shards}
    if folder == "mysql":
        parts["collation"] = COLLATIONS["MariaDB" if connection.mysql_is_mariadb else "MySQL"]
    return migrations(folder, parts)


def _marks(version: int) -> Sequence[str]:
    """The statements that note the version."""
    chosen = configuration()
    meta = chosen.names.parts["meta"]
    values = {"schema_version": version} | ({"shards": chosen.shards} if version == 1 else {})
    return [
        text
        for name, value in values.items()
        for text in (
            f"DELETE FROM {meta} WHERE name = '{name}'",
            f"INSERT INTO {meta} (name, value) VALUES ('{name}', '{value}')",
        )
    ]


def _version(connection: Any) -> int:
    """0: there is no outbox."""
    meta = configuration().names.parts["meta"]
    if not _has(connection, meta):
        return 0
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT value FROM {meta} WHERE name = 'schema_version'")
        row = cursor.fetchone()
    return int(row[0]) if row else 0


def _has(connection: Any, table: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(_HAS_TABLE[connection.vendor], [table])
        return cursor.fetchone() is not None
