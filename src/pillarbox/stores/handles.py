"""A SQL store from a handle of the application."""

from typing import Any

from pillarbox.errors import ConfigError
from pillarbox.stores.sql import SqlStore


def store_of_handle(handle: Any, **options: Any) -> SqlStore:
    """A store on the application's asyncpg pool or SQLAlchemy engine (sync or async). The application closes it.

    On PostgreSQL the store uses the connections of a pool, or of an ``AsyncEngine`` on asyncpg. From any other engine
    it takes only the URL, and opens its own connections."""
    database = "postgresql" if type(handle).__module__.startswith("asyncpg") else _database_of(handle)
    if database == "postgresql":
        from pillarbox.stores.postgres import PostgresStore

        return PostgresStore.of(handle, **options)
    if database in ("mysql", "mariadb"):
        from pillarbox.stores.mysql import MysqlStore

        return MysqlStore.of(handle, **options)
    if database == "sqlite":
        from pillarbox.stores.sqlite import SqliteStore

        return SqliteStore.of(handle, **options)
    raise ConfigError(f"there is no store for {database}; use PostgreSQL, MySQL, MariaDB, SQLite or MongoDB")


def _database_of(handle: Any) -> str:
    url = getattr(handle, "url", None)
    if url is None:
        raise ConfigError(f"a {type(handle).__name__} is no store; pass the engine, or an asyncpg pool")
    name: str = url.get_backend_name()
    return name
