"""An endpoint: its URL and the secrets that its messages are signed with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from yarl import URL

from pillarbox.errors import ConfigError
from pillarbox.publishers.http.signing import keys_of

_SCHEMES: Final = ("http", "https")


@dataclass(frozen=True, slots=True, repr=False)
class Endpoint:
    """Where an event is posted.

    url: ``https://host/path``, with its own query if it has one.
    secret: one, or several while a receiver changes it; each begins with ``whsec_``. Empty: nothing is signed.
    trusted: the URL is your own and not a customer's: it may lead into your private network, and need no https.
    """

    url: str
    secret: str | Sequence[str] = ()
    trusted: bool = False

    def __post_init__(self) -> None:
        address_of(self.url)
        object.__setattr__(self, "secret", (self.secret,) if isinstance(self.secret, str) else tuple(self.secret))
        keys_of(self.secrets)

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.secret,) if isinstance(self.secret, str) else tuple(self.secret)

    @property
    def keys(self) -> tuple[bytes, ...]:
        return keys_of(self.secrets)

    @property
    def address(self) -> URL:
        return address_of(self.url)

    @property
    def name(self) -> str:
        """For logs and errors. Without the path and the query, which may be secrets."""
        return str(self.address.origin())

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r})"


@lru_cache(maxsize=4096)
def address_of(url: str) -> URL:
    """Raises ConfigError if no request can be sent there. Its text shows nothing of the URL."""
    try:
        found = URL(url)
        port = found.port
    except (ValueError, TypeError):
        raise ConfigError("the URL of an endpoint cannot be read; write https://host/path") from None
    if found.scheme not in _SCHEMES or not found.host or not port:
        raise ConfigError(
            "the URL of an endpoint has no http:// or https://, or names no host; write https://host/path"
        )
    if found.fragment:
        raise ConfigError("the URL of an endpoint has a #, which no server gets to see; leave out what follows it")
    return found
