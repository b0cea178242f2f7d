"""I5 and I6: the order of the events of a key."""

from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush

from proof.facts import PARKED, Facts, StreamKey, name
from proof.history import Change
from proof.violation import Violation


def order(facts: Facts) -> Iterator[Violation]:
    """I5: the first deliveries of a key are in order of its numbers. A gap is a dead event, and the policy was kept.

    Exempt: events without a key, queue streams, scheduled events, replayed dead letters.
    """
    yield from _first_deliveries(facts)
    yield from _gaps(facts)
    yield from _behind_failed(facts)
    yield from _behind_dead(facts)


def _first_deliveries(facts: Facts) -> Iterator[Violation]:
    for key, deliveries in facts.by_key.items():
        if len({tuple(delivery.place[:-1]) for delivery in deliveries}) > 1:
            yield Violation("I5", "the events of a key are spread over partitions", name(key))
            continue
        seen: set[str] = set()
        highest = 0
        for delivery in deliveries:
            if delivery.event_id in seen:
                continue
            seen.add(delivery.event_id)
            n = facts.places[delivery.event_id][1]
            if n <= highest:
                what = f"{delivery.event_id} (n {n}) came after n {highest}"
                yield Violation("I5", "first deliveries of a key are out of order", name(key), what)
            highest = max(highest, n)


def _gaps(facts: Facts) -> Iterator[Violation]:
    delivered, ever_dead = facts.delivered, facts.ever_dead
    for key, events in facts.numbers.items():
        last = max((n for n, event_id in events if event_id in delivered), default=0)
        waits_from: int | None = None  # nothing behind this dead event may be delivered
        # After an operator's action only the log of changes tells how long the key had to wait.
        touched = facts.policy(key[0]) == "skip" or key in facts.operated
        for n, event_id in events:
            if event_id in delivered:
                if waits_from is not None:
                    what = f"{event_id} (n {n}) behind the dead n {waits_from}"
                    yield Violation("I5", "delivered, although its key waits for a dead event", name(key), what)
            elif event_id in ever_dead:
                if not touched and waits_from is None:
                    waits_from = n
            elif n < last and not facts.ended_by_operator(event_id):
                what = f"{event_id} (n {n}) before n {last}"
                yield Violation("I5", "left out, although it is not dead", name(key), what)


def _behind_failed(facts: Facts) -> Iterator[Violation]:
    """Finds an overtaken retry that dies later. The destination's log shows only one that succeeds later."""
    failed: dict[StreamKey, list[tuple[int, str]]] = defaultdict(list)
    now: dict[str, str | None] = {}
    for change, key, n in _placed(facts):
        event_id = change.event_id or ""
        now[event_id] = change.new
        if change.new == "failed":
            heappush(failed[key], (n, event_id))
        elif change.new == "published":
            heads = failed[key]
            while heads and now[heads[0][1]] != "failed":
                heappop(heads)
            # Only heads that are never delivered: the changes of one settle come in any order.
            if heads and heads[0][0] < n and heads[0][1] not in facts.delivered:
                what = f"{event_id} (n {n}) before n {heads[0][0]}"
                yield Violation(
                    "I5", "published while an earlier event of its key waited for its retry", name(key), what
                )


def _behind_dead(facts: Facts) -> Iterator[Violation]:
    """With the policies "block" and "park", nothing behind a dead event is published before an operator acts."""
    if all(facts.policy(stream) == "skip" for stream in {key[0] for key in facts.numbers}):
        return
    heads: dict[StreamKey, tuple[int, str]] = {}
    letters = facts.history.final.dead
    for change in facts.changes:
        key = facts.key_of(change.event_id or "")
        if key is None or facts.policy(key[0]) == "skip":
            continue
        event_id = change.event_id or ""
        n = facts.witness[event_id].n
        if change.kind == "dead" and change.new is not None:
            was_parked = str(letters.get(event_id, {}).get("error", "")).startswith(PARKED)
            if not was_parked and not facts.witness[event_id].scheduled:
                heads.setdefault(key, (n, event_id))
        elif change.kind in ("dead", "audit") and heads.get(key, (0, ""))[1] == event_id:
            del heads[key]
        elif change.kind == "event" and change.new == "published" and event_id in facts.places:
            head = heads.get(key)
            if head is not None and head[0] < n:
                what = f"{event_id} (n {n}) behind the dead n {head[0]}"
                yield Violation("I5", "published, although its key waits for a dead event", name(key), what)


def _placed(facts: Facts) -> Iterator[tuple[Change, StreamKey, int]]:
    for change in facts.changes:
        if change.kind != "event" or change.event_id is None:
            continue
        place = facts.places.get(change.event_id)
        if place is not None:
            yield change, *place


def replay_shape(facts: Facts) -> Iterator[Violation]:
    """I6: repeated deliveries leave no gap. After event n of a key comes n + 1, or a repetition."""
    for key, deliveries in facts.by_key.items():
        ranks: dict[str, int] = {}
        for _, event_id in facts.numbers[key]:
            if event_id in facts.delivered or event_id not in facts.ever_dead:
                ranks[event_id] = len(ranks) + 1
        highest = 0
        for delivery in deliveries:
            rank = ranks[delivery.event_id]
            if rank > highest + 1:
                what = f"{delivery.event_id} (n {facts.witness[delivery.event_id].n}) leaves out {rank - highest - 1}"
                yield Violation("I6", "a delivery goes beyond the next of its key", name(key), what)
            highest = max(highest, rank)
