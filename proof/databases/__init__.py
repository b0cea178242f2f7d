"""The databases that a run can be made on: what is business there, and how the database itself logs what changes."""

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
    """Imported only now: a writer starts in a fifth of the time if it loads one driver and not all."""
    module = import_module(f"proof.databases.{name.partition('-')[0]}")
    found: type[Database] = getattr(module, _CLASSES[name])
    return found
