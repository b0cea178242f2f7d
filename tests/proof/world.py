"""A tiny model of an outbox that keeps the promise. It writes the history that a real run would write."""

from dataclasses import dataclass

from proof.history import (
    Attempted,
    Change,
    Delivery,
    Effect,
    Fault,
    Final,
    History,
    Replied,
    Requested,
    Run,
    Sample,
    Trace,
    Witness,
)

CLOCK = 1_000_000.0
LEASE_SECONDS = 30.0
MAX_ATTEMPTS = 3
STREAM = "orders"


@dataclass(slots=True)
class Row:
    event_id: str
    key: str | None
    state: str
    attempts: int = 0


@dataclass(slots=True)
class Lease:
    owner: str | None = None
    token: int = 0
    until: float = 0.0


@dataclass
class World:
    """One ordered stream with one shard, and a destination with one partition. Every step takes a moment."""

    on_dead: str = "skip"

    def __post_init__(self) -> None:
        settings = {"max_attempts": MAX_ATTEMPTS, "on_dead": self.on_dead, "slots": 1, "batch": 1000, "inbox": True}
        run = Run(seed=1, store="model", broker="kafka", seconds=60.0, versions={"model": "1"}, settings=settings)
        run.clock = CLOCK
        self.history = History(run, [], [], [], [], [], [], [], [], [], [], Final({}, {}))
        self.now = 100.0
        self.rows: dict[str, Row] = {}  # in order of seq
        self.held_keys: dict[str, str] = {}
        self.heads: dict[str, str] = {}
        self.lease = Lease()
        self.numbers: dict[str | None, int] = {}
        self.failures: dict[str, int] = {}
        self.mended: set[str] = set()
        self.applied: set[str] = set()
        self.away = False

    # The application.
    def commit(
        self, *keys: str | None, fate: str = "deliver", scheduled: bool = False, result: str = "ok"
    ) -> list[str]:
        ids = []
        for key in keys:
            n = self.numbers[key] = self.numbers.get(key, 0) + 1
            event_id = f"e{len(self.history.witness) + 1}"
            self.history.witness.append(Witness(event_id, STREAM, key, n, f"hash of {event_id}", fate, scheduled))
            row = Row(event_id, key, "scheduled" if scheduled else "pending")
            self.rows[event_id] = row
            self.failures[event_id] = {"flaky": 1}.get(fate, 0)
            self._changed(row, None, row.state, by=None)
            ids.append(event_id)
        self.history.writers.append(Attempted(self.tick(), result, ids))
        return ids

    def abandon(self, result: str = "rolled_back") -> None:
        self.history.writers.append(Attempted(self.tick(), result, [f"never{len(self.history.writers)}"]))

    def request(self, key: str, body: str = "usual", status: int = 201) -> None:
        """A request with an idempotency key; with status 201 it commits, or gets the answer of the one that did."""
        known = [each for each in self.history.requests if each.key == key]
        if known and known[0].body != body:
            status = 422
        if status == 201 and not known:
            self.history.requests.append(Requested(key, body, f"answer to {key}"))
        sha256 = f"answer to {key}" if status == 201 else "problem"
        self.history.replies.append(Replied(self.tick(), key, body, status, bool(known and status == 201), sha256))

    # The relay.
    def take(self, worker: str) -> None:
        if self.lease.owner is not None:
            self.now = max(self.now, self.lease.until + 0.01)
        self.lease = Lease(worker, self.lease.token + 1, self.tick() + LEASE_SECONDS)
        self._lease_changed()
        self.trace(worker, "take")

    def give(self, worker: str) -> None:
        self.lease.owner = None
        self._lease_changed()
        self.trace(worker, "give")

    def turn(self, worker: str, limit: int = 1000, dies: str = "") -> None:
        """Read, publish and settle. ``dies``: where the worker is killed: read, sent, confirmed or settling."""
        token = self.lease.token
        for parked in [key for key, mode in self.held_keys.items() if mode == "parked"]:
            behind = [row for row in self.rows.values() if row.key == parked and row.state in ("failed", "held")]
            ids = [row.event_id for row in behind]
            if ids:
                self.trace(worker, "read_begin")
                self.trace(worker, "read", ids)
                self.trace(worker, "settle", ids)
                self._settle(behind, {}, worker)
                self.trace(worker, "settled", ids)
        for due in [key for key, mode in self.held_keys.items() if mode == "retrying"]:
            run = [row for row in self.rows.values() if row.key == due and row.state in ("failed", "held")]
            if self._work(worker, run, token, dies):
                return
        pending = [row for row in self.rows.values() if row.state == "pending"][:limit]
        self._work(worker, pending, token, dies)

    def recover(self, worker: str, gone: int = 0) -> None:
        """Exactly once: settle what the owner before had published. So many more events are lost in the database."""
        published = {delivery.event_id for delivery in self.history.deliveries}
        rows = [row for row in self.rows.values() if row.state == "pending" and row.event_id in published]
        ids = [row.event_id for row in rows]
        self.trace(worker, "recovering", ids)
        for row in rows:
            self.move(row, "published", worker)
        self.trace(worker, "recovered", ids, outcomes=[*["published"] * len(ids), *["gone"] * gone])

    def pause(self, worker: str, successor: str) -> None:
        """The worker is stopped after it has sent. Another takes over, and the settle of the first is refused."""
        token = self.lease.token
        rows = [row for row in self.rows.values() if row.state == "pending" and row.key not in self.held_keys]
        ids = [row.event_id for row in rows]
        self.trace(worker, "read_begin")
        self.trace(worker, "read", ids)
        self.trace(worker, "publish", ids)
        outcomes = self._send(rows)
        fault = Fault(self.tick(), "stop", worker)
        self.history.faults.append(fault)
        self.take(successor)
        self.turn(successor)
        fault.until = self.tick()
        self.trace(worker, "published", ids, token, outcomes)
        named = [event for event, outcome in zip(ids, outcomes, strict=True) if outcome != "untried"]
        self.trace(worker, "settle", named, token)
        self.trace(worker, "refused", named, token)

    def _work(self, worker: str, rows: list[Row], token: int, dies: str) -> bool:
        self.trace(worker, "read_begin", token=token)
        ids = [row.event_id for row in rows]
        self.trace(worker, "read", ids, token)
        if not rows or dies == "read":
            return self._dead_worker(worker, dies) if rows else False
        free = [row for row in rows if row.key not in self.held_keys or row.state != "pending"]
        sent = [row.event_id for row in free]
        self.trace(worker, "publish", sent, token)
        outcomes = self._send(free)
        if dies == "sent":
            return self._dead_worker(worker, dies)
        self.trace(worker, "published", sent, token, outcomes)
        named = [event for event, outcome in zip(sent, outcomes, strict=True) if outcome != "untried"]
        named += [row.event_id for row in rows if row.key in self.held_keys and row.state == "pending"]
        if dies == "confirmed":
            return self._dead_worker(worker, dies)
        if not named:
            return False
        self.trace(worker, "settle", named, token)
        self._settle(rows, dict(zip(sent, outcomes, strict=True)), worker)
        if dies == "settling":
            return self._dead_worker(worker, dies)
        self.trace(worker, "settled", named, token)
        return False

    def _send(self, rows: list[Row]) -> list[str]:
        outcomes = []
        stuck: set[str | None] = set()
        for row in rows:
            fate = "deliver" if row.event_id in self.mended else self.line(row.event_id).fate
            if self.away or (row.key is not None and row.key in stuck):
                outcomes.append("untried")
                continue
            if fate == "deliver" or (fate == "flaky" and not self.failures[row.event_id]):
                self.deliver(row.event_id)
                outcomes.append("published")
                continue
            self.failures[row.event_id] -= 1
            stuck.add(row.key)
            outcomes.append("rejected" if fate == "reject" else "retry")
        return outcomes

    def _settle(self, rows: list[Row], outcomes: dict[str, str], worker: str) -> None:
        for row in rows:
            outcome = outcomes.get(row.event_id)
            if outcome == "published":
                self.move(row, "published", worker)
            elif outcome == "retry":
                row.attempts += 1
                if row.attempts >= MAX_ATTEMPTS:
                    self._move_to_dead(row, "failed", worker)
                else:
                    self.move(row, "failed", worker)
                    self._hold_key(row.key, "retrying")
            elif outcome == "rejected":
                row.attempts += 1
                self._move_to_dead(row, "refused", worker)
            elif outcome is None and self.held_keys.get(row.key or "") == "parked":
                self._move_to_dead(row, "parked: an earlier event of its key is dead", worker)
            elif outcome is None:
                self.move(row, "held", worker)
        for key in [key for key, mode in self.held_keys.items() if mode == "retrying"]:
            if not any(row.key == key and row.state in ("failed", "held") for row in self.rows.values()):
                self._hold_key(key, None)

    def _move_to_dead(self, row: Row, error: str, worker: str) -> None:
        self._changed(row, row.state, None, by=worker)
        del self.rows[row.event_id]
        self.history.final.dead[row.event_id] = {
            "attempts": row.attempts,
            "error": error,
            "permanent": error == "refused",
        }
        self._log("dead", row, new="dead")
        modes = {"block": "blocked", "park": "parked", "skip": "retrying"}
        if row.key is not None and not error.startswith("parked"):
            self.heads[row.key] = row.event_id
            if self.on_dead != "skip" or row.key in self.held_keys:
                self._hold_key(row.key, modes[self.on_dead])

    def _dead_worker(self, worker: str, point: str) -> bool:
        self.history.faults.append(Fault(self.tick(), "kill", worker, point))
        return True

    # Operators and time.
    def replay(self, event_id: str) -> None:
        """The destination takes it now. It enters at the end, or returns to its place in a held key."""
        del self.history.final.dead[event_id]
        self.mended.add(event_id)
        key = self.line(event_id).key
        row = Row(event_id, key, "failed" if key in self.held_keys else "pending")
        rows = [*self.rows.values(), row]
        if row.state == "failed":
            rows.sort(key=lambda each: int(each.event_id[1:]))
        self.rows = {each.event_id: each for each in rows}
        self._changed(row, None, row.state, by=None)
        self._operated(row, "replay")

    def discard(self, event_id: str) -> None:
        del self.history.final.dead[event_id]
        self._operated(Row(event_id, self.line(event_id).key, ""), "discard")

    def _operated(self, row: Row, action: str) -> None:
        self._log("audit", row, new=action)
        self._log("dead", row, new=None)
        if row.key is not None and self.heads.get(row.key) == row.event_id and row.key in self.held_keys:
            self._hold_key(row.key, "retrying")

    def reenter_due(self) -> None:
        for row in self.rows.values():
            if row.state == "scheduled" or (row.state == "failed" and row.key is None):
                self.move(row, "pending", None)

    def outage(self, worker: str) -> None:
        """The broker cannot be reached for one turn."""
        fault = Fault(self.tick(), "broker")
        self.history.faults.append(fault)
        self.away = True
        self.turn(worker)
        self.away = False
        fault.until = self.tick()

    def rest(self, worker: str = "last") -> History:
        """Work until nothing waits, then write the end of the history."""
        self.history.run.healed = self.tick()
        if self.lease.owner != worker:
            self.take(worker)
        for _ in range(20):
            self.reenter_due()
            self.turn(worker)
        self.give(worker)
        self.history.final.states = {row.event_id: row.state for row in self.rows.values()}
        for at in (99.0, self.now + 1, self.now + 2):
            self.history.samples.append(Sample(at, 0, 0.5, 4, 60.0))
        self.history.run.ended = self.now + 2
        return self.history

    # The records of the history.
    def line(self, event_id: str) -> Witness:
        return self.history.witness[int(event_id[1:]) - 1]

    def tick(self) -> float:
        self.now += 0.01
        return self.now

    def trace(
        self,
        worker: str,
        kind: str,
        ids: list[str] | None = None,
        token: int | None = None,
        outcomes: list[str] | None = None,
    ) -> None:
        token = token or self.lease.token
        self.history.traces.append(Trace(self.tick(), worker, kind, STREAM, 0, token, ids or [], outcomes or []))

    def deliver(self, event_id: str) -> None:
        line = self.line(event_id)
        place = [0, len(self.history.deliveries)]
        if event_id not in self.applied:
            self.applied.add(event_id)
            self.history.effects.append(Effect(event_id))
        self.history.deliveries.append(Delivery(event_id, line.key, line.sha256, place, self.tick()))

    def move(self, row: Row, state: str, worker: str | None) -> None:
        old, row.state = row.state, state
        self._changed(row, old, state, by=worker)

    def _hold_key(self, key: str | None, mode: str | None) -> None:
        if key is None or self.held_keys.get(key) == mode:
            return
        if mode is None:
            del self.held_keys[key]
        else:
            self.held_keys[key] = mode
        self._log("held_key", Row("", key, ""), new=mode)

    def _changed(self, row: Row, old: str | None, new: str | None, by: str | None) -> None:
        self._log("event", row, old=old, new=new, owner=by)

    def _log(
        self, kind: str, row: Row, old: str | None = None, new: str | None = None, owner: str | None = None
    ) -> None:
        self.history.changes.append(
            Change(
                seq=len(self.history.changes) + 1,
                at=self.tick() + CLOCK,
                kind=kind,
                stream=STREAM,
                shard=0,
                event_id=row.event_id or None,
                key=row.key,
                old=old,
                new=new,
                attempts=row.attempts,
                owner=owner,
                token=self.lease.token,
            )
        )

    def _lease_changed(self) -> None:
        lease = self.lease
        at = self.tick() + CLOCK
        until = lease.until + CLOCK if lease.owner else None
        change = Change(len(self.history.changes) + 1, at, "lease", STREAM, 0)
        change.owner, change.token, change.until = lease.owner, lease.token, until
        self.history.changes.append(change)
