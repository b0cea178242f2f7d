"""Real servers for tests and benchmarks, each started and ended by the process that uses it.

with Postgres(settings={"wal_level": "logical"}) as postgres:
    psycopg.connect(postgres.url)
"""

from __future__ import annotations

from .base import Server, ServerSet, start_all
from .cache import cache_folder
from .errors import MissingError, ServerError, StartError
from .kafka import Kafka, KafkaCluster
from .mariadb import MariaDB
from .mongo import Mongo, MongoSet, MongoStandalone
from .mysql import MySQL
from .nats import Nats
from .postgres import Postgres, Postgres15
from .pulsar import Pulsar
from .rabbitmq import RabbitMQ
from .receiver import Receiver
from .valkey import Redis, Valkey

REGISTRY: dict[str, type[Server]] = {
    each.name: each
    for each in (
        Postgres,
        Postgres15,
        MariaDB,
        MySQL,
        Mongo,
        MongoSet,
        MongoStandalone,
        Kafka,
        KafkaCluster,
        Pulsar,
        RabbitMQ,
        Receiver,
        Nats,
        Valkey,
        Redis,
    )
}

__all__ = [
    "REGISTRY",
    "Kafka",
    "KafkaCluster",
    "MariaDB",
    "MissingError",
    "Mongo",
    "MongoSet",
    "MongoStandalone",
    "MySQL",
    "Nats",
    "Postgres",
    "Postgres15",
    "Pulsar",
    "RabbitMQ",
    "Receiver",
    "Redis",
    "Server",
    "ServerError",
    "ServerSet",
    "StartError",
    "Valkey",
    "cache_folder",
    "start_all",
]
