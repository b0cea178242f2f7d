"""URLs of MySQL and MariaDB."""

from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from pillarbox.errors import ConfigError

_EXAMPLE = "mysql://user:password@host:3306/database"
# The options of a URL, and the driver's names for them.
_TLS_FILES: Final = {"ssl_ca": "ca", "ssl_cert": "cert", "ssl_key": "key"}


def url_of_engine(engine: Any) -> str:
    """The URL of an SQLAlchemy engine as a store takes it: without options of its driver, except those of TLS."""
    url = engine.url
    query = {name: value for name, value in url.query.items() if name.startswith("ssl") or name == "unix_socket"}
    found: str = url.set(drivername=url.get_backend_name(), query=query).render_as_string(hide_password=False)
    return found


def connect_settings(url: str) -> dict[str, Any]:
    """The driver's settings from a URL."""
    parts = urlsplit(url)
    try:
        port = parts.port or 3306
    except ValueError:
        raise ConfigError(
            f"the store URL has a port that is no number; write {_EXAMPLE}, each part percent-encoded"
        ) from None
    database = unquote(parts.path.removeprefix("/"))
    if not database or "/" in database:
        raise ConfigError(f"the store URL names no database; write {_EXAMPLE}")
    settings: dict[str, Any] = {
        "host": unquote(parts.hostname or "localhost"),
        "port": port,
        "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or ""),
        "database": database,
    }
    files: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "ssl" and value in ("true", "false"):
            settings["ssl"] = settings.get("ssl") or value == "true"
        elif name in _TLS_FILES and value:
            if not Path(value).is_file():
                raise ConfigError(f"{name} of the store URL names the file {value}, which does not exist; correct it")
            files[_TLS_FILES[name]] = value
        elif name == "unix_socket" and value:
            settings["unix_socket"] = value
        else:
            raise ConfigError(
                f"the store URL has an option {name!r} that is unknown or has no such value; "
                "use ssl=true, ssl_ca=file, ssl_cert=file with ssl_key=file, or unix_socket=file, "
                "and percent-encode the password"
            )
    if "key" in files and "cert" not in files:
        raise ConfigError(
            "the store URL has ssl_key without ssl_cert; give both, or put both into the file of ssl_cert"
        )
    if files:
        settings["ssl"] = files
    return settings
