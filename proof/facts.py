"""Facts of a history that several invariants need, computed once."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from proof.faults import Faults
from proof.flights import Flight, Flights
from proof.history import Change, Delivery, Fault, History, Witness

PARKED = "parked"
_ENDED_BY_OPERATOR = frozenset({"discard", "purge"})

# A stream and a key: order is promised within it.
StreamKey = tuple[str, str]


@dataclass(slots=True)
class Death:
    """One death of an event."""

    event_id: str
    attempts: int | None
    error: str = ""


class Facts:
    """Settings: on_dead (a policy, or one for each stream), queue_streams (their names), delivery."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.settings: dict[str, Any] = history.run.settings
        self.witness: dict[str, Witness] = {line.event_id: line for line in history.witness}
        self.faults = Faults(history.faults)
        self.queues: frozenset[str] = frozenset(self.settings.get("queue_streams", ()))

    @property
    def exactly_once(self) -> bool:
        return bool(self.settings.get("delivery") == "exactly-once")

    def policy(self, stream: str) -> str:
        said = self.settings.get("on_dead", "skip")
        return str(said.get(stream, "skip") if isinstance(said, dict) else said)

    def monotonic(self, at: float) -> float:
        """An instant of the database's clock on the monotonic clock."""
        return at - self.history.run.clock

    @cached_property
    def changes(self) -> list[Change]:
        return sorted(self.history.changes, key=lambda change: change.seq)

    @cached_property
    def flights(self) -> Flights:
        return Flights(self.history.traces)

    @cached_property
    def delivered(self) -> Counter[str]:
        return Counter(delivery.event_id for delivery in self.history.deliveries)

    @cached_property
    def effects(self) -> Counter[str]:
        return Counter(effect.event_id for effect in self.history.effects)

    @cached_property
    def audits(self) -> Counter[tuple[str, str]]:
        """By (action, event id): how often an operator did that."""
        logged: Counter[tuple[str, str]] = Counter(
            (change.new or "", change.event_id) for change in self.changes if change.kind == "audit" and change.event_id
        )
        kept: Counter[tuple[str, str]] = Counter(
            (str(row.get("action")), str(row["event_id"])) for row in self.history.final.audit if row.get("event_id")
        )
        return Counter({act: max(logged[act], kept[act]) for act in logged.keys() | kept.keys()})

    def replays(self, event_id: str) -> int:
        return self.audits.get(("replay", event_id), 0)

    def ended_by_operator(self, event_id: str) -> bool:
        return any((action, event_id) in self.audits for action in _ENDED_BY_OPERATOR)

    @cached_property
    def operated(self) -> set[StreamKey]:
        """The keys with an event that an operator replayed or discarded."""
        return {key for _, event_id in self.audits if (key := self.key_of(event_id)) is not None}

    @cached_property
    def deaths(self) -> list[Death]:
        """Each death that was logged, and dead letters whose death is missing in the log."""
        letters = self.history.final.dead
        found = [
            Death(change.event_id, change.attempts, str(letters.get(change.event_id, {}).get("error", "")))
            for change in self.changes
            if change.kind == "dead" and change.new is not None and change.event_id
        ]
        logged = {death.event_id for death in found}
        return found + [
            Death(event_id, letter.get("attempts"), str(letter.get("error", "")))
            for event_id, letter in letters.items()
            if event_id not in logged
        ]

    @cached_property
    def ever_dead(self) -> set[str]:
        return {death.event_id for death in self.deaths}

    @cached_property
    def published_once(self) -> set[str]:
        """Ids that were published before any replay by an operator."""
        found: set[str] = set()
        replayed: set[str] = set()
        for change in self.changes:
            if change.kind == "audit" and change.new == "replay" and change.event_id:
                replayed.add(change.event_id)
            elif change.kind == "event" and change.new == "published" and change.event_id not in replayed:
                found.add(change.event_id or "")
        return found

    @cached_property
    def settled(self) -> set[tuple[str, int]]:
        """Ids that were marked or deleted as published, each with the token at that moment."""
        return {
            (change.event_id, change.token)
            for change in self.changes
            if change.kind == "event" and change.event_id is not None and change.token is not None
            if change.new == "published"
            or (change.new is None and change.old != "published" and change.event_id not in self.ever_dead)
        }

    def cause(self, flight: Flight) -> Fault | str | None:
        """The fault that explains a second copy of this flight's event."""
        token = flight.held[3]
        if flight.ending in ("gone", "refused") and token is not None and (flight.event_id, token) in self.settled:
            return None  # its settle was done; only the answer was lost
        return self.flights.cause(flight, self.faults)

    def key_of(self, event_id: str) -> StreamKey | None:
        """The key that orders this event; None: no order is promised."""
        line = self.witness.get(event_id)
        if line is None or line.key is None or line.stream in self.queues:
            return None
        return line.stream, line.key

    @cached_property
    def places(self) -> dict[str, tuple[StreamKey, int]]:
        """By event id: key and number of the events that must be delivered in order of their numbers.

        Scheduled events and replayed dead letters are left out: they enter again at the end.
        """
        keys: dict[StreamKey, StreamKey] = {}  # one tuple for each key saves memory
        found: dict[str, tuple[StreamKey, int]] = {}
        for line in self.history.witness:
            key = self.key_of(line.event_id)
            if key is None or line.scheduled:
                continue
            if not self.replays(line.event_id) or line.event_id in self.published_once:
                found[line.event_id] = keys.setdefault(key, key), line.n
        return found

    @cached_property
    def numbers(self) -> dict[StreamKey, list[tuple[int, str]]]:
        """By key: the events of ``places``, in order of their numbers."""
        found: dict[StreamKey, list[tuple[int, str]]] = defaultdict(list)
        for event_id, (key, n) in self.places.items():
            found[key].append((n, event_id))
        for events in found.values():
            events.sort()
        return found

    @cached_property
    def by_key(self) -> dict[StreamKey, list[Delivery]]:
        """By key: the deliveries of the events of ``places``, in the order of the destination's log."""
        found: dict[StreamKey, list[Delivery]] = defaultdict(list)
        for delivery in self.history.deliveries:
            place = self.places.get(delivery.event_id)
            if place is not None:
                found[place[0]].append(delivery)
        for deliveries in found.values():
            deliveries.sort(key=lambda delivery: delivery.place[-1])
        return found

    @cached_property
    def grants(self) -> dict[tuple[str, int | None], list[tuple[int, float]]]:
        """By shard: its tokens in the order in which they were granted, each with an instant at which it had certainly
        been granted.

        The database's log has the order. The instants come from the traces of the owners: a database may date a change
        before its commit.
        """
        used: dict[tuple[str, int | None, int], float] = {}
        for trace in self.history.traces:
            if trace.token is not None:
                used.setdefault((trace.stream, trace.shard, trace.token), trace.at)
        known: dict[tuple[str, int | None], dict[int, float]] = defaultdict(dict)
        for change in self.changes:
            if change.kind == "lease" and change.token is not None:
                at = used.get((change.stream, change.shard, change.token), float("inf"))
                known[change.stream, change.shard].setdefault(change.token, at)
        return {shard: list(tokens.items()) for shard, tokens in known.items()}

    @cached_property
    def superseded(self) -> dict[tuple[str, int | None, int], float]:
        """By (stream, shard, token): the instant from which a newer token had certainly been granted."""
        found: dict[tuple[str, int | None, int], float] = {}
        for (stream, shard), tokens in self.grants.items():
            newer = float("inf")
            for token, at in reversed(tokens):
                found[stream, shard, token] = newer
                newer = min(newer, at)
        return found


def name(key: StreamKey) -> str:
    return f"{key[0]}/{key[1]}"
