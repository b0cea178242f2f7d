"""Decides when to break what, by the seed. Each fault is a generator: it breaks something, yields the seconds until it
goes on, and mends it."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

from pillarbox.errors import PillarboxError
from proof.breaks import Broken, started
from proof.consumers.crew import Crew, Member
from proof.consumers.databases import Database
from proof.consumers.worker import SESSION_SECONDS
from proof.history import Fault, Log
from proof.proxy_thread import ProxyThread
from servers import Server

KINDS: Final = (
    "kill", "stop", "term", "broker", "broker_pause", "cut", "database", "sessions", "freeze", "operator",
)  # fmt: skip
_WEIGHTS: Final = {"kill": 40, "stop": 3, "term": 2, "cut": 3, "operator": 2}  # the others: 1


class Injector:
    """Starts faults at random moments; several may overlap."""

    def __init__(
        self,
        chance: Random,
        only: str | None,
        database: Database,
        broker: Server,
        crew: Crew,
        folder: Path,
        network: ProxyThread,
    ) -> None:
        """``only``: some kinds of faults, with commas."""
        kinds = only.split(",") if only else KINDS
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(f"unknown fault {unknown[0]!r}; use some of: {', '.join(KINDS)}")
        self._chance = chance
        self._database, self._broker, self._crew, self._network = database, broker, crew, network
        self._log = Log(folder / "faults.jsonl")
        self._active: list[tuple[float, Broken]] = []
        self._away: set[str] = set()  # what is down now: one fault each
        self._next = time.monotonic() + 0.5
        self._faults: list[Callable[[], Broken]] = [
            getattr(self, kind) for kind in kinds if kind != "cut" or crew.doors for _ in range(_WEIGHTS.get(kind, 1))
        ]
        self.kills = 0

    def step(self) -> None:
        """Continue the faults that are due, and start a new one when it is time."""
        now = time.monotonic()
        for due, fault in [each for each in self._active if each[0] <= now]:
            self._active.remove((due, fault))
            self._go_on(fault)
        self._crew.fill()
        if now >= self._next:
            self._go_on(self._chance.choice(self._faults)())
            self._next = time.monotonic() + self._chance.uniform(0.2, 0.9)

    def heal(self) -> None:
        """Mend everything now."""
        for _, fault in self._active:
            for pause in fault:
                time.sleep(min(pause, 0.3))
        self._active.clear()
        for member in self._crew.alive:
            member.signal(signal.SIGCONT)
        self._crew.fill()
        self._log.close()

    def _go_on(self, fault: Broken) -> None:
        try:
            self._active.append((time.monotonic() + next(fault), fault))
        except StopIteration:
            return

    def _note(self, kind: str, begun: float, member: Member | None = None) -> None:
        self._log.write(Fault(begun, kind, None if member is None else member.name, until=time.monotonic()))

    def _one(self) -> Member | None:
        members = self._crew.at_work
        return self._chance.choice(members) if members else None

    def _alone(self, what: str) -> bool:
        """Whether this is not down yet. From now on it is."""
        if what in self._away:
            return False
        self._away.add(what)
        return True

    def kill(self) -> Broken:
        member, begun = self._one(), time.monotonic()
        if member is not None:
            member.signal(signal.SIGKILL)
            member.wait(10)
            self.kills += 1
            self._note("kill", begun, member)
        yield 0.0

    def stop(self) -> Broken:
        """Stop a consumer for longer than its session with the broker, or for a little less."""
        member, begun = self._one(), time.monotonic()
        if member is None:
            return
        sessions = self._chance.choice((0.6, 1.5, 2.5))
        member.signal(signal.SIGSTOP)
        if member.door is not None and self._chance.random() < 0.5:
            self._network.run(member.door.reset())  # the broker gives its messages to others while it stands still
        yield SESSION_SECONDS * sessions
        member.signal(signal.SIGCONT)
        self._note("long_stop" if sessions > 1 else "stop", begun, member)

    def term(self) -> Broken:
        member, begun = self._one(), time.monotonic()
        if member is None:
            return
        member.signal(signal.SIGTERM)
        while member.is_alive and time.monotonic() < begun + 30:
            yield 0.1
        self._note("term", begun, member)

    def broker(self) -> Broken:
        if self._alone("broker"):
            begun = time.monotonic()
            self._broker.kill()
            yield self._chance.uniform(0.5, 3.0)
            yield from started(self._broker)
            self._away.discard("broker")
            self._note("broker", begun)

    def broker_pause(self) -> Broken:
        if self._alone("broker"):
            begun = time.monotonic()
            self._broker.pause()
            yield self._chance.uniform(0.5, 4.0)
            self._broker.resume()
            self._away.discard("broker")
            self._note("broker", begun)

    def cut(self) -> Broken:
        """Break the network between some consumers and the broker: cut or half open."""
        doors = [member.door for member in self._crew.at_work if member.door is not None]
        if not doors:
            return
        door, begun = self._chance.choice(doors), time.monotonic()
        changes = (door.reset, door.drop, lambda: door.cut_after(self._chance.randint(100, 20_000), "to_client"))
        self._network.run(self._chance.choice(changes)())
        yield self._chance.uniform(0.5, 4.0)
        self._network.run(door.heal())
        self._note("cut", begun)

    def database(self) -> Broken:
        if self._alone("database"):
            begun = time.monotonic()
            self._database.server.kill()
            yield self._chance.uniform(0.2, 3.0)
            self._database.server.start()
            self._away.discard("database")
            self._note("database", begun)

    def freeze(self) -> Broken:
        """The server keeps its connections and answers nothing."""
        if self._alone("database"):
            begun = time.monotonic()
            self._database.server.pause()
            yield self._chance.uniform(0.5, 3.0)
            self._database.server.resume()
            self._away.discard("database")
            self._note("database", begun)

    def sessions(self) -> Broken:
        """End every connection of the consumers."""
        if self._alone("database"):
            begun = time.monotonic()
            self._database.cut_sessions()
            self._away.discard("database")
            self._note("sessions", begun)
        yield 0.0

    def operator(self) -> Broken:
        """Replay dead letters: they die again."""
        if self._alone("database"):
            begun = time.monotonic()
            try:
                done = self._database.replay(5)
            except (PillarboxError, OSError):  # it has just come back
                done = 0
            self._away.discard("database")
            if done:
                self._note("operator", begun)
        yield 0.0
