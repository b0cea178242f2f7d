"""The databases that a run can be made on: what is business there, and how the database itself logs what changes."""

from pathlib import Path

from proof.databases.base import Database
from proof.databases.mongo import MongoProof, MongoSetProof
from proof.databases.sql import MysqlProof, PostgresProof, SqliteProof

DATABASES: dict[str, type[Database]] = {
    "postgres": PostgresProof,
    "mysql": MysqlProof,
    "sqlite": SqliteProof,
    "mongo": MongoProof,
    "mongo-set": MongoSetProof,
}


def make(name: str, folder: Path) -> Database:
    return DATABASES[name](folder)
