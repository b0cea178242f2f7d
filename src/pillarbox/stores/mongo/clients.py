"""The PyMongo client under a store: one of its own, made from a URL, or one of the application."""

from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from pymongo import AsyncMongoClient
from pymongo.errors import ConfigurationError

from pillarbox.errors import ConfigError

Client: TypeAlias = AsyncMongoClient[Any]

CONNECT_SECONDS: Final = 10.0
COMMAND_SECONDS: Final = 30.0
_EXAMPLE: Final = "mongodb://user:password@host:27017/database?replicaSet=rs0"


class OwnClient:
    """A client that lives from the store's open to its close.

    servers: the addresses, without secrets. database: the one in the URL or of the client.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self.database: str | None = unquote(parts.path.removeprefix("/"))
        hosts = parts.netloc.rpartition("@")[2]
        self.servers = f"{parts.scheme} {hosts}"
        # A part of an unescaped password would be taken for a host or database, and shown.
        if "@" in parts.path + parts.fragment or ("@" in parts.query and "@" not in parts.netloc):
            raise ConfigError(
                f"the store URL has a password with unescaped characters; write {_EXAMPLE}, "
                "in a password @ as %40, / as %2F, # as %23 and ? as %3F"
            )
        if not hosts or not self.database or "/" in self.database:
            raise ConfigError(f"the store URL names no server or no database; write {_EXAMPLE}")

    def get(self) -> Client:
        try:
            return AsyncMongoClient(
                self.url,
                appname="pillarbox",
                serverSelectionTimeoutMS=int(CONNECT_SECONDS * 1000),
                connectTimeoutMS=int(CONNECT_SECONDS * 1000),
                timeoutMS=int(COMMAND_SECONDS * 1000),
                retryWrites=True,
            )
        except (OSError, ValueError) as error:  # a file of certificates, or a port
            raise ConfigError(f"the store URL cannot be used ({_reason(error)}); write {_EXAMPLE}") from None

    async def release(self, client: Client) -> None:
        await client.close()


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file of certificates'} cannot be read: {error.strerror or error}"
    return "a host or a port is wrong"  # the driver's words can quote the URL


class GivenClient:
    """A client of the application."""

    def __init__(self, client: Client) -> None:
        addresses = sorted(client.topology_description.server_descriptions())
        self.servers = "mongodb " + ",".join(f"{host}:{port}" if port else host for host, port in addresses)
        self._client = client
        try:
            self.database: str | None = client.get_default_database().name
        except ConfigurationError:
            self.database = None

    def get(self) -> Client:
        return self._client

    async def release(self, client: Client) -> None:
        """Nothing to do: the application closes it."""


def client_source(client: Any) -> OwnClient | GivenClient:
    """From a URL, or from the application's client."""
    if isinstance(client, str):
        return OwnClient(client)
    if isinstance(client, AsyncMongoClient):
        return GivenClient(client)
    kind = type(client)
    raise ConfigError(
        f"a store on MongoDB cannot use a {kind.__qualname__} of {kind.__module__.partition('.')[0]}; "
        "pass a pymongo.AsyncMongoClient, or a URL"
    )
