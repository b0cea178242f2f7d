"""Stores, publishers and sources by URL, and stores by a handle of the application. Adapters are imported when asked
for.

Other packages add a scheme with an entry point in the group ``pillarbox.stores``, ``pillarbox.publishers`` or
``pillarbox.sources``. Its name is the scheme, its value a class with ``from_url(url, **options)`` and ``options``, the
names of these options.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final
from urllib.parse import urlsplit

from pillarbox.errors import ConfigError, PillarboxError
from pillarbox.hints import hint
from pillarbox.publisher import Publisher
from pillarbox.source import Source
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
    "pulsar": "pillarbox.publishers.pulsar:PulsarPublisher",
    "pulsar+ssl": "pillarbox.publishers.pulsar:PulsarPublisher",
    "amqp": "pillarbox.publishers.rabbitmq:RabbitMQPublisher",
    "amqps": "pillarbox.publishers.rabbitmq:RabbitMQPublisher",
    "nats": "pillarbox.publishers.nats:NatsPublisher",
    "tls": "pillarbox.publishers.nats:NatsPublisher",
    "redis": "pillarbox.publishers.redis:RedisPublisher",
    "rediss": "pillarbox.publishers.redis:RedisPublisher",
    "valkey": "pillarbox.publishers.redis:RedisPublisher",
    "valkeys": "pillarbox.publishers.redis:RedisPublisher",
    "http": "pillarbox.publishers.http:HttpPublisher",
    "https": "pillarbox.publishers.http:HttpPublisher",
    "stdout": "pillarbox.publishers.stdout:StdoutPublisher",
    "file": "pillarbox.publishers.stdout:FilePublisher",
}
SOURCES: Final[Mapping[str, str]] = {
    "kafka": "pillarbox.sources.kafka:KafkaSource",
    "pulsar": "pillarbox.sources.pulsar:PulsarSource",
    "pulsar+ssl": "pillarbox.sources.pulsar:PulsarSource",
    "amqp": "pillarbox.sources.rabbitmq:RabbitMQSource",
    "amqps": "pillarbox.sources.rabbitmq:RabbitMQSource",
}
# As SQLAlchemy's URLs name a driver, and as other tools name PostgreSQL.
_DRIVER: Final = re.compile(r"^(?:(postgres)|(postgresql|mysql|mariadb|sqlite))(?:\+\w+)?:", re.IGNORECASE)
# By the package that a handle's class, or one of its bases, comes from.
_HANDLES: Final = {
    "asyncpg": "pillarbox.stores.handles",
    "sqlalchemy": "pillarbox.stores.handles",
    "pymongo": "pillarbox.stores.mongo.handles",
    "motor": "pillarbox.stores.mongo.handles",  # refused there
}


def store_of(handle: Any, **options: Any) -> Store:
    """A store from a URL, from what the application has already, or the store itself.

    handle: a Store, a URL, an asyncpg pool, an SQLAlchemy engine, or a PyMongo client or database.
    options: of the new store, such as ``prefix``.
    """
    if isinstance(handle, str):
        return store_from_url(handle, **options)
    packages = [kind.__module__.partition(".")[0] for kind in type(handle).__mro__]
    module = next((_HANDLES[package] for package in packages if package in _HANDLES), None)
    if module is not None:
        made: Store = import_module(module).store_of_handle(handle, **options)
        return made
    # After the packages: a PyMongo client has every attribute that it is asked for.
    if isinstance(handle, type) or not hasattr(handle, "settle"):
        raise ConfigError(
            f"a {type(handle).__name__} is no store; pass a URL, a Store, an asyncpg pool, an SQLAlchemy engine, "
            "or a PyMongo client or database"
        )
    if options:
        raise ConfigError(f"{', '.join(options)}: give a store its options where you make it")
    store: Store = handle
    return store


def store_from_url(url: str, **options: Any) -> Store:
    """``postgresql://user@host/database``, ``mysql://user@host/database``, ``mariadb://user@host/database``,
    ``mongodb://user@host/database?replicaSet=rs0``, ``sqlite:///relative.db``, ``sqlite:////absolute.db``,
    ``memory:``. A driver as in ``postgresql+asyncpg://`` is ignored."""
    url = without_driver(url)
    store: Store = _with_options(store_class(url), "store", url, options)
    return store


def without_driver(url: str) -> str:
    """A store's URL, also if it was written for SQLAlchemy."""
    return _DRIVER.sub(lambda found: f"{(found[2] or 'postgresql').lower()}:", url)


def store_class(url: str) -> Any:
    """The adapter for a store's URL: a class with ``from_url`` and ``options``."""
    return _adapter("store", "pillarbox.stores", STORES, url)


def publisher_from_url(url: str, **options: Any) -> Publisher:
    """``kafka://host:9092?topic=orders``, ``pulsar://host:6650/tenant/namespace?topic=orders``,
    ``amqp://host/vhost?exchange=shop``, ``nats://host:4222?subject=orders``,
    ``redis://host:6379/0?stream=orders``, ``https://host/path``, ``stdout:``, ``file:///path/events.jsonl``."""
    kind = _adapter("destination", "pillarbox.publishers", PUBLISHERS, url)
    publisher: Publisher = _with_options(kind, "publisher", url, options)
    return publisher


def source_from_url(url: str, **options: Any) -> Source:
    """``kafka://host:9092?topic=orders``, ``pulsar://host:6650/tenant/namespace?topic=orders``."""
    source: Source = _with_options(_adapter("source", "pillarbox.sources", SOURCES, url), "source", url, options)
    return source


def _with_options(kind: Any, what: str, url: str, options: Mapping[str, Any]) -> Any:
    for name in options:
        if name not in kind.options:
            meant = hint(name, sorted(kind.options)) if kind.options else "leave it out"
            raise ConfigError(f"a {urlsplit(url).scheme} {what} has no option {name!r}; {meant}")
    return kind.from_url(url, **options)


def _adapter(what: str, group: str, built_in: Mapping[str, str], url: str) -> Any:
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        # The text is not shown: any part of it may be a secret.
        raise ConfigError(f"the {what} is not a URL; in a password write [ as %5B and ] as %5D") from None
    if scheme in built_in:
        module, _, name = built_in[scheme].partition(":")
        return getattr(import_module(module), name)
    installed = entry_points(group=group)
    found = [point for point in installed if point.name.lower() == scheme]
    if not found:
        meant = hint(scheme, [*built_in, *sorted(installed.names)])
        if not scheme:
            # The text is not shown: without a scheme any part of it may be a secret.
            raise ConfigError(f"the {what} is not a URL; {meant}")
        raise ConfigError(f"a {what} URL cannot start with {scheme!r}; {meant}")
    if len(found) > 1:
        packages = ", ".join(sorted(_package(point) for point in found))
        raise ConfigError(f"several packages serve {scheme!r} URLs: {packages}; uninstall all but one")
    return _loaded(found[0])


def _loaded(point: EntryPoint) -> Any:
    try:
        kind = point.load()
    except PillarboxError:
        raise
    except Exception as error:
        raise _broken(point, f"cannot be loaded ({type(error).__name__}: {error})") from error
    for name in ("from_url", "options"):
        if not hasattr(kind, name):
            raise _broken(point, f"has no {name!r}")
    return kind


def _broken(point: EntryPoint, problem: str) -> ConfigError:
    return ConfigError(
        f"{point.name!r} URLs are served by {point.value} of the package {_package(point)}, which {problem}; "
        "correct or uninstall the package"
    )


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
