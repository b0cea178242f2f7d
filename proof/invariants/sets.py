"""I1 to I4: loss, phantoms, integrity and atomicity."""

from collections.abc import Iterator

from proof.facts import Facts
from proof.violation import Violation

LOST = "committed, but neither delivered nor dead nor discarded by an operator"
GONE = "published, and the database has lost it"
UNSETTLED = "delivered, but the outbox still has it as waiting"
_OVER = ("published", "dead")


def no_loss(facts: Facts) -> Iterator[Violation]:
    """I1: every committed event was delivered, is dead, or was discarded with an audit row. At rest nothing waits.

    With the policy "block", events behind a dead one wait as long as their key is blocked and has a dead letter.
    """
    final = facts.history.final
    blocked = _blocked_keys(facts)
    for event_id, line in facts.witness.items():
        state = final.states.get(event_id)
        waits = state is not None and state not in _OVER
        if waits and state in ("held", "failed") and (line.stream, line.key) in blocked:
            continue
        if event_id in facts.delivered:
            if waits:
                yield Violation("I1", UNSETTLED, event_id, f"state {state}")
        elif event_id not in final.dead and not facts.ended_by_operator(event_id):
            yield Violation("I1", LOST, event_id, f"state {state}, key {line.key}, n {line.n}")
    for trace in facts.history.traces:
        if trace.kind == "recovered" and "gone" in trace.outcomes:
            what = f"{trace.outcomes.count('gone')} events, noticed by {trace.worker}"
            yield Violation("I1", GONE, f"{trace.stream}/{trace.shard}", what)


def _blocked_keys(facts: Facts) -> set[tuple[str, str | None]]:
    modes: dict[tuple[str, str | None], str | None] = {}
    for change in facts.changes:
        if change.kind == "held_key":
            modes[change.stream, change.key] = change.new
    dead = {(line.stream, line.key) for line in map(facts.witness.get, facts.history.final.dead) if line is not None}
    blocked = {key for key, mode in modes.items() if mode == "blocked" and facts.policy(key[0]) == "block"}
    return blocked & dead


def no_phantom(facts: Facts) -> Iterator[Violation]:
    """I2: every delivered event was committed."""
    for event_id, copies in facts.delivered.items():
        if event_id not in facts.witness:
            yield Violation("I2", "delivered, but never committed", event_id, f"{copies} times")


def integrity(facts: Facts) -> Iterator[Violation]:
    """I3: key, payload and headers are delivered as they were written."""
    for delivery in facts.history.deliveries:
        line = facts.witness.get(delivery.event_id)
        if line is None:
            continue
        if delivery.key != line.key:
            yield Violation("I3", "delivered with another key", line.event_id, f"{delivery.key}, not {line.key}")
        elif delivery.sha256 != line.sha256:
            yield Violation("I3", "delivered with another content", line.event_id, f"at {list(delivery.place)}")


def atomicity(facts: Facts) -> Iterator[Violation]:
    """I4: the outbox has exactly the events whose business data was committed, and each transaction as a whole."""
    inserted = {change.event_id for change in facts.changes if change.kind == "event" and change.old is None}
    for event_id in facts.witness:
        if inserted and event_id not in inserted:
            yield Violation("I4", "the business data was committed without its event", event_id)
    for stray in inserted - facts.witness.keys():
        if stray is not None:
            yield Violation("I4", "the event was committed without its business data", stray)
    for attempt in facts.history.writers:
        there = [event_id for event_id in attempt.event_ids if event_id in facts.witness]
        subject = attempt.event_ids[0] if attempt.event_ids else ""
        if there and attempt.result in ("failed", "rolled_back"):
            yield Violation("I4", "in the database, although its transaction did not commit", there[0])
        elif len(there) < len(attempt.event_ids) and (there or attempt.result == "ok"):
            what = f"{len(there)} of {len(attempt.event_ids)} events, the client saw: {attempt.result}"
            yield Violation("I4", "a transaction is in the database only in part", subject, what)
