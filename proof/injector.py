"""What is done to a run. Each fault is a generator: it breaks something, yields for how long, and mends it."""

import os
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from proof.crew import Crew, Worker
from proof.databases.base import Database
from proof.history import Fault, Log
from proof.proxy import Proxy
from proof.worker import POINTS
from tests.servers import Kafka

Broken: TypeAlias = Generator[float, None, None]

_MOST_WORKERS = 8


_COMMITS = {"mongo": (b"commitTransaction",), "mysql": (b"COMMIT",)}


def _modes(proxy: Proxy, chance: Random) -> list[tuple[str, Callable[[], Any]]]:
    return [
        ("delay", lambda: proxy.delay(chance.uniform(0.01, 0.2), 0.05)),
        ("throttle", lambda: proxy.throttle(20_000)),
        ("reset", proxy.reset),
        ("refuse", lambda: proxy.refuse(reset=True)),
        ("drop", lambda: proxy.drop("both")),
        ("drop replies", lambda: proxy.drop("to_client")),
        ("cut", lambda: proxy.cut_after(chance.randint(100, 20_000), "to_client")),
    ]


class Injector:
    """Breaks something every now and then, one thing or several at a time, as the seed says."""

    def __init__(
        self,
        kind: str,
        only: str | None,
        chance: Random,
        database: Database,
        kafka: Kafka | None,
        crew: Crew,
        folder: Path,
    ) -> None:
        self._chance = chance
        self._database = database
        self._kafka = kafka
        self._crew = crew
        self._log = Log(folder / "faults.jsonl")
        self._wanted = len(crew.alive)
        self._active: list[tuple[float, Broken]] = []
        self._next = time.monotonic() + 1.5
        self._away: set[str] = set()  # servers that are down now: one fault each
        self._faults = self._choose(kind, only)

    def _choose(self, kind: str, only: str | None) -> list[Callable[[], Broken]]:
        if kind == "none":
            return []
        if kind == "term":
            return [self.term]
        known: dict[str, tuple[int, Callable[[], Broken]]] = {
            "kill": (4, self.kill),
            "kill_at_point": (6, self.kill_at_point),
            "stop": (3, self.stop),
            "term": (2, self.term),
            "scale": (1, self.scale),
            "clock": (1, self.clock),
            "writer": (1, self.kill_writer),
            "operator": (1, self.operator),
        }
        if self._database.port is not None:
            known |= {"network": (3, self.network), "swallow": (3, self.swallow)}
        if self._database.can_restart:
            known |= {"database": (1, self.database), "sessions": (2, self.sessions), "freeze": (1, self.freeze)}
        if self._kafka is not None:
            known |= {"broker": (1, self.broker), "broker_pause": (1, self.broker_pause)}
            known |= {"broker_network": (2, self.broker_network)}
        if only is not None:
            return [known[only][1]]
        return [fault for weight, fault in known.values() for _ in range(weight)]

    def step(self, end: float) -> None:
        """Go on with what is broken, and break something new when it is time."""
        now = time.monotonic()
        for due, fault in [each for each in self._active if each[0] <= now]:
            self._active.remove((due, fault))
            self._go_on(fault)
        self._man()
        # Nothing new shortly before the end: what heals late is part of the recovery, not of the faults.
        if self._faults and now >= self._next and now < end - 3.0:
            self._go_on(self._chance.choice(self._faults)())
            self._next = now + self._chance.uniform(0.3, 2.0)

    def _go_on(self, fault: Broken) -> None:
        try:
            self._active.append((time.monotonic() + next(fault), fault))
        except StopIteration:
            return

    def heal(self) -> None:
        """Mend everything at once."""
        for _, fault in self._active:
            for _ in fault:
                continue
        self._active.clear()
        for worker in self._crew.alive:
            worker.signal(signal.SIGCONT)
            worker.arm("")

    def _man(self) -> None:
        """There are as many relays as there should be."""
        while len(self._crew.alive) < self._wanted:
            self._crew.start_worker()

    def _note(self, kind: str, worker: Worker | None = None, point: str | None = None, at: float = 0.0) -> None:
        now = time.monotonic()
        name = None if worker is None else worker.name
        self._log.write(Fault(at or now, kind, name, point, now))

    def _one(self) -> Worker | None:
        alive = self._crew.alive
        return self._chance.choice(alive) if alive else None

    def kill(self) -> Broken:
        worker = self._one()
        if worker is not None:
            worker.signal(signal.SIGKILL)
            worker.wait(10)
            self._note("kill", worker, "random")
        yield 0.0

    def kill_at_point(self) -> Broken:
        worker, point = self._one(), self._chance.choice(POINTS)
        if worker is None:
            return
        worker.arm(point)
        deadline = time.monotonic() + 6.0
        while worker.is_alive and time.monotonic() < deadline:
            yield 0.02
        if worker.is_alive:
            worker.arm("")
            yield 0.2  # it may be on its way
        if not worker.is_alive and worker.process.returncode == -signal.SIGKILL:
            self._note("kill", worker, point)

    def stop(self) -> Broken:
        """Stopped for longer than its lease, or for a little less."""
        worker = self._one()
        if worker is None:
            return
        begun = time.monotonic()
        worker.signal(signal.SIGSTOP)
        yield self._crew.orders.lease_seconds * self._chance.choice((0.5, 1.2, 1.6))
        worker.signal(signal.SIGCONT)
        self._note("stop", worker, at=begun)

    def term(self) -> Broken:
        worker = self._one()
        if worker is None:
            return
        begun = time.monotonic()
        worker.signal(signal.SIGTERM)
        while worker.is_alive and time.monotonic() < begun + 30:
            yield 0.05
        self._note("term", worker, at=begun)

    def scale(self) -> Broken:
        """One, many, and as many as before."""
        usual = self._wanted
        self._wanted = 1
        for worker in self._crew.alive[1:]:
            worker.signal(signal.SIGTERM)
            self._note("term", worker)
        yield 2.0
        self._wanted = _MOST_WORKERS
        self._note("start")
        yield 4.0
        self._wanted = usual
        for worker in self._crew.alive[usual:]:
            worker.signal(signal.SIGTERM)
            self._note("term", worker)

    def clock(self) -> Broken:
        """One relay's clock is an hour off."""
        worker = self._crew.start_worker(self._chance.choice(("+1h", "-1h")))
        self._note("clock", worker)
        yield 5.0
        worker.signal(signal.SIGTERM)
        self._note("term", worker)

    def kill_writer(self) -> Broken:
        alive = [number for number, writer in enumerate(self._crew.writers) if writer.poll() is None]
        if len(alive) > 1:
            writer = self._crew.writers[self._chance.choice(alive[1:])]
            os.kill(writer.pid, signal.SIGSTOP)
            yield 1.0
            os.kill(writer.pid, signal.SIGCONT)
            self._note("writer")

    def operator(self) -> Broken:
        """Replays what is dead and prunes, while the relays work."""

        async def act(store: Any) -> None:
            letters = await store.dead_letters(limit=20)
            await store.replay([letter.event.id for letter in letters], "proof")
            await store.prune_published(3600.0, 1000)

        begun = time.monotonic()
        if self._away:
            return
        try:
            self._database.ask(act)
        except Exception:  # the database may be away
            return
        self._note("operator", at=begun)
        yield 0.0

    def database(self) -> Broken:
        if not self._away:
            self._away.add("database")
            begun = time.monotonic()
            self._database.crash()
            yield self._chance.uniform(0.2, 3.0)
            self._database.come_back()
            self._away.discard("database")
            self._note("database", at=begun)

    def sessions(self) -> Broken:
        begun = time.monotonic()
        if not self._away:
            self._database.cut_sessions()
            self._note("sessions", at=begun)
        yield 0.0

    def freeze(self) -> Broken:
        """The server keeps its connections and answers nothing."""
        server = self._database.server
        if server is not None and not self._away:
            self._away.add("database")
            begun = time.monotonic()
            server.pause()
            yield self._chance.uniform(0.5, self._crew.orders.lease_seconds * 1.5)
            server.resume()
            self._away.discard("database")
            self._note("database", point="frozen", at=begun)

    def network(self) -> Broken:
        """Between one relay and the database."""
        worker = self._one()
        if worker is None or worker.to_database is None:
            return
        begun = time.monotonic()
        name, change = self._chance.choice(_modes(worker.to_database, self._chance))
        self._crew.network.run(change())
        yield self._chance.uniform(0.3, self._crew.orders.lease_seconds * 1.5)
        self._crew.network.run(worker.to_database.heal())
        self._note(f"proxy:{name}", worker, at=begun)

    def swallow(self) -> Broken:
        """What one relay asks of the database is done, and the answer never comes."""
        worker = self._one()
        if worker is None or worker.to_database is None:
            return
        begun = time.monotonic()
        after = self._chance.choice((b"", *_COMMITS.get(self._database.name, ())))
        self._crew.network.run(worker.to_database.swallow_replies(after=after))
        yield self._chance.uniform(0.3, 2.0)
        self._crew.network.run(worker.to_database.heal())
        self._note("proxy:swallow", worker, at=begun)

    def broker_network(self) -> Broken:
        """Between some relays and the broker: slow, half open, or acknowledgements that never come."""
        proxy = self._chance.choice(self._crew.network.broker)
        begun = time.monotonic()
        name, change = self._chance.choice([*_modes(proxy, self._chance), ("swallow", proxy.swallow_replies)])
        self._crew.network.run(change())
        yield self._chance.uniform(0.5, 4.0)
        self._crew.network.run(proxy.heal())
        self._note("broker", point=f"proxy:{name}", at=begun)

    def broker(self) -> Broken:
        if self._kafka is not None and "broker" not in self._away:
            self._away.add("broker")
            begun = time.monotonic()
            self._kafka.kill()
            yield self._chance.uniform(0.5, 3.0)
            self._kafka.start()
            self._away.discard("broker")
            self._note("broker", at=begun)

    def broker_pause(self) -> Broken:
        if self._kafka is not None and "broker" not in self._away:
            self._away.add("broker")
            begun = time.monotonic()
            self._kafka.pause()
            yield self._chance.uniform(0.5, 4.0)
            self._kafka.resume()
            self._away.discard("broker")
            self._note("broker", point="half open", at=begun)
