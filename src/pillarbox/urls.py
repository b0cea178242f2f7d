"""Stores and destinations by URL. Adapters are named here and imported only when one is asked for."""

import difflib
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

from pillarbox.errors import ConfigError
from pillarbox.publisher import Publisher
from pillarbox.store import Store

STORES: Final = {
    "postgresql": "pillarbox.stores.postgres:PostgresStore",
    "mysql": "pillarbox.stores.mysql:MysqlStore",
    "mariadb": "pillarbox.stores.mysql:MysqlStore",
    "mongodb": "pillarbox.stores.mongo:MongoStore",
    "mongodb+srv": "pillarbox.stores.mongo:MongoStore",
    "sqlite": "pillarbox.stores.sqlite:SqliteStore",
    "memory": "pillarbox.stores.memory:MemoryStore",
}
PUBLISHERS: Final = {
    "kafka": "pillarbox.publishers.kafka:KafkaPublisher",
    "stdout": "pillarbox.publishers.stdout:StdoutPublisher",
    "file": "pillarbox.publishers.stdout:FilePublisher",
}


def store_from_url(url: str, **options: Any) -> Store:
    """``postgresql://user@host/database``, ``mysql://user@host/database``, ``mariadb://user@host/database``,
    ``mongodb://user@host/database?replicaSet=rs0``, ``sqlite:///relative.db``, ``sqlite:////absolute.db``,
    ``memory:``."""
    store: Store = store_class(url).from_url(url, **options)
    return store


def store_class(url: str) -> Any:
    """The adapter that a store's URL asks for."""
    return _adapter("store", STORES, url)


def publisher_from_url(url: str, **options: Any) -> Publisher:
    """``kafka://host:9092?topic=orders``, ``stdout:``, ``file:///path/events.jsonl``."""
    publisher: Publisher = _adapter("destination", PUBLISHERS, url).from_url(url, **options)
    return publisher


def _adapter(what: str, known: dict[str, str], url: str) -> Any:
    scheme = urlsplit(url).scheme
    if scheme not in known:
        near = difflib.get_close_matches(scheme, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(known)}"
        if not scheme:
            # Not shown: without a scheme nobody can tell what of it is a secret.
            raise ConfigError(f"the {what} is not a URL; {hint}")
        raise ConfigError(f"a {what} URL cannot start with {scheme!r}; {hint}")
    module, _, name = known[scheme].partition(":")
    return getattr(import_module(module), name)
