"""I11: deaths and charged attempts."""

from collections.abc import Iterator

from proof.facts import Facts, StreamKey
from proof.violation import Violation

_MAX_ATTEMPTS = 5  # a stream's default


def dead(facts: Facts) -> Iterator[Violation]:
    """I11: an event dies of a permanent error, of its last attempt, or behind a dead event of a parked key. An outage
    charges no attempt, and no kill buries an event."""
    yield from _deaths(facts)
    yield from _charges(facts)


def _deaths(facts: Facts) -> Iterator[Violation]:
    limit = int(facts.settings.get("max_attempts", _MAX_ATTEMPTS))
    first: dict[StreamKey, int] = {}  # by key: the lowest number of a dead event
    for event_id in facts.ever_dead:
        key = facts.key_of(event_id)
        if key is not None:
            first[key] = min(facts.witness[event_id].n, first.get(key, facts.witness[event_id].n))
    for death in facts.deaths:
        line = facts.witness.get(death.event_id)
        if line is None or line.fate == "reject" or (death.attempts or 0) >= limit:
            continue
        key = facts.key_of(death.event_id)
        parks = key is not None and facts.policy(key[0]) == "park"
        # A replayed event of a parked key dies again, with any number.
        in_any_place = line.scheduled or facts.replays(death.event_id) > 0
        if parks and key is not None and (in_any_place or first[key] < line.n):
            continue
        what = f"fate {line.fate}, {death.attempts} of {limit} attempts"
        yield Violation("I11", "dead without a permanent error and before its last attempt", death.event_id, what)


def _charges(facts: Facts) -> Iterator[Violation]:
    attempts: dict[str, int] = {}
    for change in facts.changes:
        if change.kind != "event" or change.event_id is None or change.attempts is None:
            continue
        if change.new == "processing":
            continue  # a claim is charged in advance and may be refunded: only its end counts
        before = attempts.get(change.event_id, 0) if change.old is not None else change.attempts
        attempts[change.event_id] = change.attempts
        line = facts.witness.get(change.event_id)
        # A successful attempt counts too: some relays still reach a broker that others cannot reach.
        succeeded = 1 if change.new == "published" else 0
        if change.attempts <= before + succeeded or line is None or line.fate != "deliver":
            continue
        at = facts.monotonic(change.at)
        outage = facts.faults.broker.overlapping(at, at)
        if outage is not None:
            what = f"{before} to {change.attempts} attempts"
            yield Violation("I11", "charged an attempt while the broker was away", change.event_id, what)
