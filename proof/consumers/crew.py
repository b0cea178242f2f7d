"""The processes of a run, and the member that disturbs their group."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from proof.consumers.databases import CONSUMER
from proof.consumers.worker import Orders, run
from proof.proxy import Proxy

_JOINED_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 1.5
# Consumers are forked from a process that has imported everything: a storm of kills would else be one of imports.
_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["proof.consumers.worker", "sqlalchemy.ext.asyncio", "asyncpg", "pymongo"])
_ASSIGNED: Final = b"' has proof"  # in the log of a consumer that gets partitions


@dataclass(slots=True)
class Member:
    """One consumer."""

    name: str
    process: ForkServerProcess
    log: Path
    patience: float  # how long it may work before a fault hits it
    door: Proxy | None = None  # to the broker
    since: float | None = None  # when it was seen to have partitions

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def is_at_work(self) -> bool:
        """Whether it has had partitions for a while: to kill it before that would prove nothing."""
        if self.since is None and _ASSIGNED in self.log.read_bytes():
            self.since = time.monotonic()
        return self.is_alive and self.since is not None and time.monotonic() >= self.since + self.patience

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def wait(self, seconds: float) -> bool:
        self.process.join(seconds)
        return not self.is_alive


class Crew:
    """Starts and ends the consumers; ``close`` ends all of them."""

    def __init__(self, folder: Path, orders: Orders, size: int, doors: Sequence[Proxy] = ()) -> None:
        """``doors``: proxies to the broker; without any the consumers reach it directly."""
        self._folder, self._orders, self._size = folder, orders, size
        self.doors = doors
        self._chance = Random(orders.seed)
        self.members: list[Member] = []

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.is_alive]

    @property
    def at_work(self) -> list[Member]:
        return [member for member in self.alive if member.is_at_work()]

    def fill(self) -> None:
        """Start consumers until there are as many as planned."""
        while len(self.alive) < self._size:
            name = f"c{len(self.members) + 1}"
            file = self._folder / f"{name}.log"
            file.touch()
            orders, door = replace(self._orders, name=name), None
            if self.doors:
                door = self.doors[len(self.members) % len(self.doors)]
                orders.servers = f"127.0.0.1:{door.port}"
            process = _FORKS.Process(target=run, args=(orders, str(file)))
            process.start()
            self.members.append(Member(name, process, file, self._chance.uniform(0.0, _PATIENCE_SECONDS), door))

    def stop(self, seconds: float) -> list[str]:
        """Send SIGTERM to all. Returns the names of those that did not end."""
        for member in self.alive:
            member.signal(signal.SIGCONT)
            member.signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        late = [member.name for member in self.members if not member.wait(max(0.1, deadline - time.monotonic()))]
        self.close()
        return late

    def broken(self) -> list[str]:
        """Those that ended by themselves."""
        wanted = (0, -signal.SIGKILL, -signal.SIGTERM)
        ended = [(member.name, member.process.exitcode) for member in self.members if not member.is_alive]
        return [f"{name} ({code})" for name, code in ended if code not in wanted]

    def assignments(self) -> int:
        """How often a consumer got partitions."""
        return sum(member.log.read_bytes().count(_ASSIGNED) for member in self.members)

    def close(self) -> None:
        for member in self.alive:
            member.signal(signal.SIGCONT)
            member.process.kill()
            member.process.join()


class Restless:
    """A member of the group that joins and leaves all the time, so that the partitions move every second. It commits
    nothing."""

    def __init__(self, orders: Orders) -> None:
        self._topic, self._servers = orders.topic, orders.servers
        self._config = {
            "bootstrap.servers": orders.servers,
            "group.id": CONSUMER,
            "group.protocol": orders.protocol,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 2,
        }
        if orders.protocol == "classic":
            self._config |= {"partition.assignment.strategy": "cooperative-sticky", "session.timeout.ms": 2000}
        self._stop = threading.Event()
        self.joined = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            self.visit()

    def rest(self) -> None:
        """Wait while it is a member, or while the broker is away."""
        self._stop.wait(_JOINED_SECONDS)

    def visit(self) -> None:
        """Join, and leave."""
        member = Consumer(self._config)
        try:
            member.subscribe([self._topic], on_assign=self._count)
            until = time.monotonic() + _JOINED_SECONDS
            while time.monotonic() < until and not self._stop.is_set():
                member.poll(0.1)
        except KafkaException:  # the broker is away, as the run wants it
            self._stop.wait(0.2)
        finally:
            member.close()

    def _count(self, _member: object, _given: list[TopicPartition]) -> None:
        self.joined += 1
