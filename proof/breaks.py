"""The faults. Each is a generator: it breaks something, yields the seconds until it goes on, and mends it."""

import signal
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from pillarbox.errors import PillarboxError
from pillarbox.store import Ref
from proof.crew import Crew, Worker
from proof.databases.base import Database
from proof.history import Fault, Log
from proof.network import modes
from proof.tracer import ABORTING, EXACTLY_ONCE_POINTS, POINTS
from servers import Server
from servers.base import ServerSet

Broken: TypeAlias = Generator[float, None, None]

_MOST_WORKERS = 8
_AT_POINT_SECONDS = 6.0  # a point that the relay has not reached by then is given up
_RARE_POINTS = frozenset({"pruning", ABORTING})  # nobody waits there until a relay comes by
_COMMITS = {"mongo": (b"commitTransaction",), "mysql": (b"COMMIT",)}


def started(server: Server) -> Broken:
    """Start a server. Other faults go on meanwhile: some brokers need half a minute."""
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(server.start)
        while not starting.done():
            yield 0.1
        starting.result()


class Breaks:
    """The faults, and the state that they share."""

    def __init__(self, chance: Random, database: Database, broker: Server | None, crew: Crew, detail: str) -> None:
        """``detail``: points, a clock or the action of an operator; empty: any."""
        self._chance = chance
        self._database = database
        self._broker = broker
        self._nodes: Sequence[Server] = broker.nodes if isinstance(broker, ServerSet) else [broker] if broker else []
        self._crew = crew
        self._detail = detail
        self._log = Log(crew.folder / "faults.jsonl")
        self._wanted = len(crew.alive)
        self._away: set[str] = set()  # what is down now: one fault each
        self._killed: set[str] = set()
        self._killed_at: set[str] = set()
        self._aimed_at: set[str] = set()  # a relay knows one point at a time
        self._used: set[str] = set()  # points that were aimed at since all of them had been
        self._healing = False
        self.points = (*POINTS, *(EXACTLY_ONCE_POINTS if crew.orders.exactly_once else ()))
        self.done = 0

    def _note(self, kind: str, worker: Worker | None = None, point: str | None = None, at: float = 0.0) -> None:
        now = time.monotonic()
        name = None if worker is None else worker.name
        self._log.write(Fault(at or now, kind, name, point, now))
        self.done += 1

    def _one(self) -> Worker | None:
        alive = self._crew.alive
        return self._chance.choice(alive) if alive else None

    def _node(self) -> Server:
        """The broker, or one of its nodes."""
        return self._nodes[0] if len(self._nodes) == 1 else self._chance.choice(self._nodes)

    def _note_kill(self, worker: Worker, point: str) -> None:
        """Note one kill for each worker, even if two faults hit it."""
        if worker.name not in self._killed and worker.process.poll() == -signal.SIGKILL:
            self._killed.add(worker.name)
            self._killed_at.add(point)
            self._note("kill", worker, point)

    def _point(self, points: Sequence[str]) -> str:
        """The next point, in random order; no point comes twice before all have come once."""
        wanted = self._detail.split(",") if self._detail else points
        left = [point for point in wanted if point not in self._used]
        if not left:
            self._used.difference_update(wanted)
            left = list(wanted)
        point = self._chance.choice(left)
        self._used.add(point)
        return point

    def kill(self) -> Broken:
        worker = self._one()
        if worker is not None:
            worker.signal(signal.SIGKILL)
            worker.wait(10)
            self._note_kill(worker, "random")
        yield 0.0

    def kill_at_point(self) -> Broken:
        worker = self._one()
        if worker is None or worker.name in self._aimed_at:
            return
        self._aimed_at.add(worker.name)
        point = self._point(self.points)
        worker.arm(signal.SIGKILL, point)
        deadline = time.monotonic() + _AT_POINT_SECONDS
        with self._unanswered(point):
            while worker.is_alive and time.monotonic() < deadline and not self._healing:
                yield 0.02
        if worker.is_alive:
            worker.disarm()
            yield 0.2  # it may be on its way
        self._aimed_at.discard(worker.name)
        self._note_kill(worker, point)
        if worker.is_alive:
            self._used.discard(point)

    @contextmanager
    def _unanswered(self, point: str) -> Iterator[None]:
        """Freeze the broker if only this leads to the point: a transaction that is not confirmed is aborted."""
        if point != ABORTING or self._broker is None or "broker" in self._away:
            yield
            return
        self._away.add("broker")
        begun = time.monotonic()
        node = self._node()
        node.pause()
        try:
            yield
        finally:
            node.resume()
            self._away.discard("broker")
            self._note("broker", point="half open", at=begun)

    def _took_since(self, worker: Worker, begun: float) -> bool:
        """Whether another relay has taken shards since then."""
        taken = self._crew.taken()
        return any(at > begun for name, at in taken.items() if name != worker.name)

    def stop(self) -> Broken:
        """Stop a relay for longer than its lease, or for a little less."""
        worker = self._one()
        if worker is None:
            return
        begun = time.monotonic()
        worker.signal(signal.SIGSTOP)
        yield self._crew.orders.lease_seconds * self._chance.choice((0.5, 1.2, 1.6))
        worker.signal(signal.SIGCONT)
        self._note("stop", worker, at=begun)

    def stop_at_point(self) -> Broken:
        """Stop a relay at a point until another one has taken its shards. One is stopped at a time."""
        worker = self._one()
        if worker is None or worker.is_stopped() or worker.name in self._aimed_at or "relay" in self._away:
            return
        self._aimed_at.add(worker.name)
        self._away.add("relay")
        point = self._point([point for point in self.points if point not in _RARE_POINTS])
        begun = time.monotonic()
        deadline = begun + _AT_POINT_SECONDS
        worker.arm(signal.SIGSTOP, point)
        while worker.is_alive and not worker.is_stopped() and not self._healing:
            begun = time.monotonic()
            if begun > deadline:
                break
            yield 0.02
        worker.disarm()
        yield 0.05
        if worker.is_stopped():
            lease = self._crew.orders.lease_seconds
            yield lease * 1.4
            # On a busy machine the others notice it late.
            while not self._took_since(worker, begun) and time.monotonic() < begun + lease * 5 and not self._healing:
                yield 0.1
            worker.signal(signal.SIGCONT)
            self._note("stop", worker, point, at=begun)
        self._aimed_at.discard(worker.name)
        self._away.discard("relay")

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
        """Change the number of relays to one, to many, and back."""
        if "scale" in self._away:
            return
        self._away.add("scale")
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
        self._away.discard("scale")

    def clock(self) -> Broken:
        """Start a relay whose clock is an hour off."""
        begun = time.monotonic()
        worker = self._crew.start_worker(float(self._detail or self._chance.choice((3600, -3600))))
        while worker.name not in self._crew.taken() and time.monotonic() < begun + 20.0 and not self._healing:
            yield 0.1
        self._note("clock", worker, at=begun)
        yield 2.0
        worker.signal(signal.SIGTERM)
        self._note("term", worker)

    def writer(self) -> Broken:
        """Stop one writer in the middle of its work; it goes on later, or is killed."""
        clients = self._crew.clients
        if not clients:
            return
        client = self._chance.choice(clients)
        begun = time.monotonic()
        client.signal(signal.SIGSTOP)
        if self._chance.random() < 0.5:
            yield 1.0
            client.signal(signal.SIGCONT)
        else:
            client.signal(signal.SIGKILL)
            client.wait(10)
            self._crew.start_writer(client.load)
        self._note("writer", at=begun)

    def client(self) -> Broken:
        """Break the network between a writer and the database: it never learns whether its COMMIT was done."""
        clients = self._crew.clients
        if not clients:
            return
        proxy = self._chance.choice(clients).to_database
        if proxy is None:
            return
        begun = time.monotonic()
        self._crew.network.run(self._chance.choice((proxy.swallow_replies, proxy.reset))())
        yield self._chance.uniform(0.1, 1.0)
        self._crew.network.run(proxy.heal())
        self._note("writer", point="network", at=begun)

    def operator(self) -> Broken:
        """Replay or discard dead letters, and prune, while the relays work."""
        action = self._detail or self._chance.choice(("replay", "replay", "discard"))

        async def act(store: Any) -> int:
            letters = await store.dead_letters(limit=20)
            await store.prune_published(3600.0, 1000)
            refs = [Ref(letter.event.id, letter.event.stream) for letter in letters]
            return int(await getattr(store, action)(refs, "proof"))

        begun = time.monotonic()
        if "database" in self._away:
            return
        try:
            done = self._database.ask(act, self._crew.orders.planted)
        except (PillarboxError, OSError):  # the database may be away
            return
        if done:
            self._note("operator", point=action, at=begun)
        yield 0.0

    def shut_the_door(self) -> Broken:
        """The destination of the handlers cannot be reached."""
        if "broker" not in self._away:
            self._away.add("broker")
            shut = Path(self._crew.orders.broker["shut"])
            begun = time.monotonic()
            shut.touch()
            yield self._chance.uniform(0.5, 3.0)
            shut.unlink()
            self._away.discard("broker")
            self._note("broker", at=begun)

    def database(self) -> Broken:
        if "database" not in self._away:
            self._away.add("database")
            begun = time.monotonic()
            self._database.crash()
            yield self._chance.uniform(0.2, 3.0)
            self._database.come_back()
            self._away.discard("database")
            self._note("database", at=begun)

    def sessions(self) -> Broken:
        begun = time.monotonic()
        if "database" not in self._away:
            self._database.cut_sessions()
            self._note("sessions", at=begun)
        yield 0.0

    def freeze(self) -> Broken:
        """The server keeps its connections and answers nothing."""
        server = self._database.server
        if server is not None and "database" not in self._away:
            self._away.add("database")
            begun = time.monotonic()
            server.pause()
            yield self._chance.uniform(0.5, self._crew.orders.lease_seconds * 1.5)
            server.resume()
            self._away.discard("database")
            self._note("database", point="frozen", at=begun)

    def lock(self) -> Broken:
        """Lock the table of events, or the whole file, for a while."""
        if "database" in self._away:
            return
        self._away.add("database")
        begun = time.monotonic()
        with self._database.locked() as is_locked:
            if is_locked:
                yield self._chance.uniform(0.3, self._crew.orders.lease_seconds * 1.5)
        self._away.discard("database")
        if is_locked:
            self._note("database", point="locked", at=begun)

    def migration(self) -> Broken:
        """Migrate another outbox in the same database and kill the migration. The end of the run completes it."""
        begun = time.monotonic()
        process = self._crew.start_migration(self._chance.uniform(0.0, 0.1))
        while process.poll() is None:
            yield 0.1
        if process.returncode == -signal.SIGKILL:
            self._note("migration", at=begun)

    def network(self) -> Broken:
        """Break the network between one relay and the database."""
        worker = self._one()
        if worker is None or worker.to_database is None:
            return
        begun = time.monotonic()
        name, change = self._chance.choice(modes(worker.to_database, self._chance))
        self._crew.network.run(change())
        yield self._chance.uniform(0.3, self._crew.orders.lease_seconds * 1.5)
        self._crew.network.run(worker.to_database.heal())
        self._note(f"proxy:{name}", worker, at=begun)

    def swallow(self) -> Broken:
        """The database does what one relay asks, and its answers are lost."""
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
        """Break the network between some relays and the broker: slow, half open, or acknowledgements are lost."""
        proxy = self._chance.choice(self._crew.network.broker)
        begun = time.monotonic()
        name, change = self._chance.choice([*modes(proxy, self._chance), ("swallow", proxy.swallow_replies)])
        self._crew.network.run(change())
        yield self._chance.uniform(0.5, 4.0)
        self._crew.network.run(proxy.heal())
        self._note("broker", point=f"proxy:{name}", at=begun)

    def broker(self) -> Broken:
        if self._broker is not None and "broker" not in self._away:
            self._away.add("broker")
            begun = time.monotonic()
            node = self._node()
            node.kill()
            yield self._chance.uniform(0.5, 3.0)
            yield from started(node)
            self._away.discard("broker")
            self._note("broker", at=begun)

    def broker_pause(self) -> Broken:
        if self._broker is not None and "broker" not in self._away:
            self._away.add("broker")
            begun = time.monotonic()
            node = self._node()
            node.pause()
            yield self._chance.uniform(0.5, 4.0)
            node.resume()
            self._away.discard("broker")
            self._note("broker", point="half open", at=begun)
