"""Decides when to break what, by the seed."""

import signal
import time
from collections.abc import Callable
from random import Random

from proof.breaks import Breaks, Broken
from proof.crew import Crew
from proof.databases.base import Database
from servers import Server

_LONG_SECONDS = 120.0


class Injector(Breaks):
    """Starts faults at random moments; several may overlap."""

    def __init__(
        self,
        kind: str,
        only: str | None,
        chance: Random,
        database: Database,
        broker: Server | None,
        crew: Crew,
        seconds: float,
        least: int = 0,
        every_point: bool = False,
        least_kills: int = 0,
    ) -> None:
        """``only``: one kind of fault, again and again. After a colon: points, a clock or the action of an operator:
        ``kill_at_point:settled``, ``stop_at_point:reading,settling``, ``clock:3600``, ``operator:replay``."""
        only, _, detail = (only or "").partition(":")
        super().__init__(chance, database, broker, crew, detail)
        self._least, self._every_point, self._least_kills = least, every_point, least_kills
        self._active: list[tuple[float, Broken]] = []
        self._next = time.monotonic() + min(1.5, seconds / 8)
        # No new fault shortly before the end, so that faults end before the recovery is measured.
        self._last = time.monotonic() + seconds - min(3.0, seconds / 4)
        # Short runs have many faults; long runs leave time to recover between them.
        is_short = seconds < _LONG_SECONDS or crew.orders.exactly_once  # its leases are short, too
        self._pause_seconds = (0.2, 0.6) if only else (0.3, 2.0) if is_short else (0.5, 4.0)
        self._faults = self._choose(kind, only)
        # A run that demands kills also has each fault of the broker once.
        self._owed: list[Callable[[], Broken]] = []
        if least_kills and broker is not None and kind == "all" and not only:
            self._owed = [self.broker_pause, self.broker_network]
            if self._can_kill_the_broker:
                self._owed.append(self.broker)

    @property
    def _can_kill_the_broker(self) -> bool:
        """A lone node of Kafka that is killed forgets the ends of transactions: docs/proof.md."""
        return len(self._nodes) > 1 or not self._crew.orders.exactly_once

    def _choose(self, kind: str, only: str) -> list[Callable[[], Broken]]:
        known: dict[str, tuple[int, Callable[[], Broken]]] = {
            "kill": (8, self.kill),
            "kill_at_point": (14, self.kill_at_point),
            "stop": (2, self.stop),
            "stop_at_point": (3, self.stop_at_point),
            "term": (2, self.term),
            "scale": (1, self.scale),
            "writer": (1, self.writer),
            "operator": (2, self.operator),
            "lock": (1, self.lock),
            "migration": (1, self.migration),
        }
        if self._can_kill_the_broker:
            known["broker"] = (1, self.shut_the_door if self._broker is None else self.broker)
        if self._database.port is not None:
            known |= {"network": (3, self.network), "swallow": (3, self.swallow), "client": (2, self.client)}
        if self._database.has_own_clock:
            known["clock"] = (1, self.clock)
        if self._database.can_restart:
            known |= {"database": (1, self.database), "sessions": (2, self.sessions), "freeze": (1, self.freeze)}
        if self._broker is not None:
            pauses = 3 if self._crew.orders.exactly_once else 1
            known |= {"broker_pause": (pauses, self.broker_pause), "broker_network": (2, self.broker_network)}
        if only:
            if only not in known:
                raise ValueError(f"unknown fault {only!r}; use one of: {', '.join(known)}")
            return [known[only][1]]
        if kind == "none":
            return []
        if kind == "term":
            return [self.term]
        return [fault for weight, fault in known.values() for _ in range(weight)]

    def step(self) -> None:
        """Continue the faults that are due, and start a new one when it is time."""
        now = time.monotonic()
        for due, fault in [each for each in self._active if each[0] <= now]:
            self._active.remove((due, fault))
            self._go_on(fault)
        self._start_missing()
        if self._faults and now >= self._next and (now < self._last or not self.is_enough()):
            begin = self._chance.choice(self._faults if now < self._last else self._owed or self._faults)
            if self._go_on(begin()) and begin in self._owed:
                self._owed.remove(begin)
            self._next = now + self._chance.uniform(*self._pause_seconds)

    def is_enough(self) -> bool:
        """Whether the run has had the faults that its plan demands."""
        if self.done < self._least or len(self._killed) < self._least_kills or self._owed:
            return False
        return not self._every_point or self._killed_at.issuperset(self.points)

    def _go_on(self, fault: Broken) -> bool:
        """Whether it has not ended with this."""
        try:
            self._active.append((time.monotonic() + next(fault), fault))
        except StopIteration:
            return False
        return True

    def heal(self) -> None:
        """Mend everything now."""
        self._healing = True
        for _, fault in self._active:
            for pause in fault:
                time.sleep(min(pause, 0.3))
        self._active.clear()
        for worker in self._crew.alive:
            worker.signal(signal.SIGCONT)
        self._log.close()

    def _start_missing(self) -> None:
        """Start relays until there are as many as planned."""
        while len(self._crew.alive) < self._wanted:
            self._crew.start_worker()
