"""Keeps passwords out of everything that is printed."""

import re
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

_SECRET_OPTION: Final = re.compile(r"pass|secret|token|key|credential|^query$", re.IGNORECASE)  # a webhook's query
# Options whose value is the path of a private key, and others that only name a place.
_KEY_FILE: Final = re.compile(r"ssl\.key\.location|sslkey|ssl_key|tlsCertificateKeyFile", re.IGNORECASE)
_PLACE: Final = re.compile(rf"{_KEY_FILE.pattern}|.*(?:location|file|path|endpoint\.url)", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"://[^\s@]*:\S*@")
_SHORTEST: Final = 4  # a shorter secret would be found in too many words

_known: set[str] = set()


def remember(url: str) -> None:
    """Mask the secrets of this URL from now on."""
    try:
        parts = urlsplit(url)
    except ValueError:
        _known.add(url)
        return
    user, at, _ = parts.netloc.rpartition("@")
    found = [url] if "@" in url else []
    if at and ":" in user:
        found.append(user.partition(":")[2])
    found += [value for name, value in parse_qsl(parts.query) if _is_secret(name)]
    for secret in found:
        _known.update(each for each in (secret, unquote(secret)) if len(each) >= _SHORTEST)


def masked(text: str) -> str:
    """The text without the known secrets, and without the password of any URL: one can be typed in a wrong place."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _PASSWORD.sub("://***@", text)


def is_garbled(url: str) -> bool:
    """Whether the URL is not valid, for example because of unescaped characters in its password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    user, at, hosts = parts.netloc.rpartition("@")
    if at:
        return ":" in user and "@" in parts.path + parts.fragment
    is_cut = "@" in parts.path + parts.query + parts.fragment
    return is_cut and any(":" in host and not host.rpartition(":")[2].isdigit() for host in hosts.split(","))


def has_password(url: str) -> bool:
    """Whether a secret stands in the URL itself. One that is in a file does not."""
    parts = urlsplit(url)
    user = parts.netloc.rpartition("@")[0]
    return ":" in user or any(_is_secret(name) for name, _ in parse_qsl(parts.query))


def _is_secret(option: str) -> bool:
    return bool(_SECRET_OPTION.search(option)) and not _PLACE.fullmatch(option)


def key_files(url: str) -> list[str]:
    """The files with private keys that the URL names."""
    return [value for name, value in parse_qsl(urlsplit(url).query) if _KEY_FILE.fullmatch(name)]
