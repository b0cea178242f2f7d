"""Triggers that log each change of the outbox, for databases where a trigger serves one operation."""

from collections.abc import Iterator
from dataclasses import dataclass

from proof.content import QUEUE


def log(kind: str, **columns: str) -> str:
    """A statement that logs a change. Columns that are not given stay NULL."""
    names, values = ", ".join(("kind", *columns)), ", ".join((f"'{kind}'", *columns.values()))
    return f"INSERT INTO proof_change ({names}) VALUES ({values})"


@dataclass(frozen=True, slots=True)
class Spelling:
    """The syntax of a database.

    id: an id as text. until: an instant as in ``proof_change``. differ: compares two values that may be NULL.
    trigger: the statement around the log.
    """

    key: str
    id: str
    until: str
    differ: str
    trigger: str

    def triggers(self) -> Iterator[str]:
        differ = self.differ.format
        moved = f"{differ('OLD.status', 'NEW.status')} OR {differ('OLD.attempts', 'NEW.attempts')}"
        for table, when, condition, statement in (
            ("event", "INSERT", "", self._event("NEW", new="NEW.status")),
            ("event", "UPDATE", moved, self._event("NEW", old="OLD.status", new="NEW.status", token=_held("NEW"))),
            ("event", "DELETE", "", self._event("OLD", old="OLD.status", token=_held("OLD"))),
            ("lease", "INSERT", "", self._lease()),
            ("lease", "UPDATE", "", self._lease()),
            ("held_key", "INSERT", "", self._held_key("NEW", new="NEW.mode")),
            ("held_key", "UPDATE", "", self._held_key("NEW", old="OLD.mode", new="NEW.mode")),
            ("held_key", "DELETE", "", self._held_key("OLD", old="OLD.mode")),
            ("dead_letter", "INSERT", "", self._dead("NEW", new="'dead'")),
            ("dead_letter", "DELETE", "", self._dead("OLD", old="'dead'")),
            ("audit", "INSERT", "", self._audit()),
        ):
            name = f"proof_{table}_{when.lower()}"
            yield self.trigger.format(name=name, when=when, table=table, condition=condition or "1 = 1", log=statement)

    def _row(self, row: str) -> dict[str, str]:
        return {"stream": f"{row}.stream", "shard": f"{row}.shard", "k": f"{row}.{self.key}"}

    def _event(self, row: str, **columns: str) -> str:
        event_id = self.id.format(f"{row}.id")
        return log("event", **self._row(row), event_id=event_id, attempts=f"{row}.attempts", **columns)

    def _dead(self, row: str, **columns: str) -> str:
        event_id = self.id.format(f"{row}.id")
        return log("dead", **self._row(row), event_id=event_id, attempts=f"{row}.attempts", **columns)

    def _held_key(self, row: str, **columns: str) -> str:
        return log("held_key", **self._row(row), **columns)

    def _lease(self) -> str:
        until = self.until.format("NEW.lease_until")
        return log("lease", stream="NEW.stream", shard="NEW.shard", owner="NEW.owner", token="NEW.token", until=until)

    def _audit(self) -> str:
        event_id = self.id.format("NEW.event_id")
        return log("audit", stream="NEW.stream", event_id=event_id, new="NEW.action", owner="NEW.operator")


def _held(row: str) -> str:
    """The token of the shard's lease at this moment; in a queue stream, of the event's own lease.

    A pruned event has no lease, and reading one would wait for its lock.
    """
    lease = f"(SELECT token FROM outbox_lease WHERE stream = {row}.stream AND shard = {row}.shard)"
    own = f"WHEN {row}.stream = '{QUEUE}' THEN {row}.lease_token"
    return f"CASE WHEN {row}.status = 'published' AND '{row}' = 'OLD' THEN NULL {own} ELSE {lease} END"
