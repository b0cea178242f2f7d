"""The databases of a run: business tables, and a log of changes that the database itself writes."""

from importlib import import_module

from proof.databases.base import Database

_CLASSES = {
    "postgres": "PostgresProof",
    "mysql": "MysqlProof",
    "sqlite": "SqliteProof",
    "mongo": "MongoProof",
    "mongo-set": "MongoSetProof",
}
NAMES = tuple(_CLASSES)


def kind_of(name: str) -> type[Database]:
    """Imports one driver only, so that a writer starts five times as fast."""
    module = import_module(f"proof.databases.{name.partition('-')[0]}")
    found: type[Database] = getattr(module, _CLASSES[name])
    return found
