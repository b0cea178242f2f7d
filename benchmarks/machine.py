"""The machine, the versions, the command and the load before a run."""

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import confluent_kafka

from servers.kafka import VERSION as KAFKA_VERSION

_CLIENTS = ("asyncpg", "confluent-kafka")


@dataclass(frozen=True)
class Conditions:
    """The conditions of a run, printed above the tables."""

    machine: str
    servers: str
    clients: str
    command: str
    load: float
    """Processes that wanted a core in the last minute before the run; above 0.5 they affect the figures."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{name:<9} {value}" for name, value in self.as_dict().items())


def conditions(command: str, postgres: str, load: float) -> Conditions:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    clients = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _CLIENTS)
    return Conditions(
        f"{_processor()}, {cores} cores for everything, {memory:.0f} GB, {platform.system()}",
        f"PostgreSQL {postgres} (fsync on), Kafka {KAFKA_VERSION} (acks=all, 1 broker)",
        f"Python {platform.python_version()}, {clients}, librdkafka {confluent_kafka.libversion()[0]}",
        command,
        round(load, 2),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
