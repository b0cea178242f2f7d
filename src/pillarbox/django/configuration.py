"""The setting PILLARBOX: the settings of ``pillarbox.toml``, and the database that has the outbox."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections

from pillarbox.cli.settings import SETTINGS, Document, Settings
from pillarbox.errors import ConfigError
from pillarbox.hints import hint
from pillarbox.names import Names
from pillarbox.store import Store
from pillarbox.urls import store_from_url

NAME: Final = "PILLARBOX"
_DATABASE: Final = "database"
_KEYS: Final = (_DATABASE, *SETTINGS, "streams", "consumers")
_STORE_OPTIONS: Final = ("prefix", "schema", "shards", "listen_url", "wake_up", "pool_size", "statement_cache")
# Options of Django's databases that a store's URL has too. It ignores those that matter to Django's connections only.
_POSTGRES_OPTIONS: Final = ("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile", "options")
_MYSQL_TLS: Final = {"ca": "ssl_ca", "cert": "ssl_cert", "key": "ssl_key"}
_UNKNOWN: Final = ("service", "read_default_file", "read_default_group")


class Configuration(NamedTuple):
    """The setting, as it was written. alias: of the database that has the outbox."""

    alias: str
    values: Mapping[str, Any]

    @property
    def names(self) -> Names:
        return Names(self.values.get("prefix", "outbox"), self.values.get("schema"))

    @property
    def shards(self) -> int:
        return int(self.values.get("shards", 16))

    def document(self) -> Document:
        """The settings of the command line, with the store."""
        store = {} if "store" in self.values else {"store": store_url(self.alias)}
        return Document(f"the setting {NAME}", {**self.values, **store})

    def store(self) -> Store:
        """The store, not yet open, with connections of its own."""
        values = self.document().values
        return store_from_url(values["store"], **{name: values[name] for name in _STORE_OPTIONS if name in values})

    def check(self) -> None:
        """Raise ConfigError for settings that are wrong. It connects to nothing."""
        if self.alias not in connections.settings:
            raise ConfigError(
                f"{_DATABASE!r} of the setting {NAME} is {self.alias!r}, which is not in DATABASES; "
                f"{hint(self.alias, connections.settings)}"
            )
        Settings({}, {}, None, Document(f"the setting {NAME}", self.values))
        _ = self.names


def configuration() -> Configuration:
    """Of the project; read again each time, because tests change settings."""
    values = getattr(settings, NAME, {})
    if not isinstance(values, Mapping):
        raise ConfigError(f"the setting {NAME} is a {type(values).__name__}; write {NAME} = {{...}} with text as keys")
    others = dict(values)
    for name in others:
        if name not in _KEYS:
            # Settings of Django's own are in capitals.
            meant = hint(str(name).lower(), _KEYS, "see `manage.py pillarbox relay --help` for the settings")
            raise ConfigError(f"the setting {NAME} has an unknown key {name!r}; {meant}")
    return Configuration(others.pop(_DATABASE, DEFAULT_DB_ALIAS), others)


def store_url(alias: str) -> str:
    """The URL of a database in DATABASES; in a test run that of its test database."""
    connection = connections[alias]
    given = connection.settings_dict
    options = given.get("OPTIONS", {})
    unknown = [name for name in _UNKNOWN if name in options]
    if unknown:
        raise ConfigError(
            f"the database {alias!r} has the option {unknown[0]!r}, which the relay cannot read; write its URL into "
            f"{NAME} as 'store', or into the environment as PILLARBOX_STORE"
        )
    if connection.vendor == "sqlite":
        return _sqlite_url(alias, given)
    scheme = {"postgresql": "postgresql", "mysql": "mysql"}.get(connection.vendor)
    if scheme is None:
        raise ConfigError(
            f"the database {alias!r} is of {connection.vendor}, which Pillarbox does not know; name one of PostgreSQL, "
            f"MySQL, MariaDB or SQLite as 'database' in {NAME}"
        )
    host, query = str(given["HOST"] or ""), {}
    if scheme == "postgresql":
        query = {name: str(options[name]) for name in _POSTGRES_OPTIONS if name in options}
        socket = "host"
    else:
        tls = options.get("ssl") or {}
        query = {ours: str(tls[name]) for name, ours in _MYSQL_TLS.items() if tls.get(name)}
        socket = "unix_socket"
        if "unix_socket" in options:
            query[socket] = str(options["unix_socket"])
    if host.startswith("/"):
        query[socket], host = host, ""
    user = quote(given["USER"], safe="")
    password = f":{quote(given['PASSWORD'], safe='')}" if given["PASSWORD"] else ""
    at = f"{user}{password}@" if user else ""
    port = f":{given['PORT']}" if given["PORT"] else ""
    after = f"?{urlencode(query)}" if query else ""
    return f"{scheme}://{at}{host}{port if host else ''}/{quote(str(given['NAME'] or ''), safe='')}{after}"


def _sqlite_url(alias: str, given: Mapping[str, Any]) -> str:
    path = str(given["NAME"])
    if ":memory:" in path or "mode=memory" in path:
        raise ConfigError(
            f"the database {alias!r} is in memory, where no relay can reach it; give it a file: in tests as "
            '"TEST": {"NAME": BASE_DIR / "test.sqlite3"} in DATABASES'
        )
    return f"sqlite:///{Path(path)}"
