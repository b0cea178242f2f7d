"""URLs of PostgreSQL."""

import re
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from pillarbox.errors import ConfigError

_HOST: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(?::([0-9]{0,5}))?")
_LAST_PORT: Final = 65_535
_TLS_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_DRIVER: Final = re.compile(r"^postgres(?:ql)?(?:\+\w+)?://")


def plain_url(url: str) -> str:
    """The URL without the driver's name that SQLAlchemy adds."""
    return _DRIVER.sub("postgresql://", url)


def _host(text: str) -> re.Match[str] | None:
    found = _HOST.fullmatch(text)
    return found if found is not None and int(found[2] or 0) <= _LAST_PORT else None


def where(url: str) -> str:
    """The servers and the database. Refuses a URL with an unescaped password, because a part of it would be shown, and
    one that names a missing file."""
    parts = urlsplit(url)
    hosts = [_host(text) for text in parts.netloc.rpartition("@")[2].split(",")]
    if "@" in parts.path + parts.fragment or ("@" in parts.query and "@" not in parts.netloc) or not all(hosts):
        raise ConfigError(
            "the store URL has a port that is no number, or a password with unescaped characters; "
            "write postgresql://user@host:5432/database, in a password @ as %40, / as %2F, # as %23 and ? as %3F"
        )
    for name, value in parse_qsl(parts.query):
        if name in _TLS_FILES and value != "system" and not Path(value).is_file():
            raise ConfigError(f"{name} of the store URL names the file {value}, which does not exist; correct it")
    places = ",".join(f"{host[1] or 'localhost'}:{host[2] or 5432}" for host in hosts if host is not None)
    return f"postgresql {places}{parts.path}"
