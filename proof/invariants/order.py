"""I5 and I6: per key, in the order of the destination's log."""

from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush

from proof.facts import PARKED, Facts, Lane, name
from proof.history import Change
from proof.violation import Violation


def order(facts: Facts) -> Iterator[Violation]:
    """I5: first deliveries of a key follow its numbers; a gap is a dead event, and the policy was kept.

    Exempt: events without a key, streams that are queues, scheduled events, dead events that an operator replayed.
    """
    yield from _first_deliveries(facts)
    yield from _gaps(facts)
    yield from _behind_failed(facts)
    yield from _behind_dead(facts)


def _first_deliveries(facts: Facts) -> Iterator[Violation]:
    for lane, deliveries in facts.by_key.items():
        if len({tuple(delivery.place[:-1]) for delivery in deliveries}) > 1:
            yield Violation("I5", "the events of a key are spread over partitions", name(lane))
            continue
        seen: set[str] = set()
        highest = 0
        for delivery in deliveries:
            if delivery.event_id in seen:
                continue
            seen.add(delivery.event_id)
            n = facts.witness[delivery.event_id].n
            if n <= highest:
                what = f"{delivery.event_id} (n {n}) came after n {highest}"
                yield Violation("I5", "first deliveries of a key are out of order", name(lane), what)
            highest = max(highest, n)


def _gaps(facts: Facts) -> Iterator[Violation]:
    for lane, lines in facts.numbers.items():
        last = max((line.n for line in lines if line.event_id in facts.delivered), default=0)
        waits_from: int | None = None  # behind this dead event nothing may come
        touched = facts.policy(lane[0]) == "skip" or any(_operated(facts, line.event_id) for line in lines)
        for line in lines:
            if line.event_id in facts.delivered:
                if waits_from is not None:
                    what = f"{line.event_id} (n {line.n}) behind the dead n {waits_from}"
                    yield Violation("I5", "delivered, although its key waits for a dead event", name(lane), what)
            elif line.event_id in facts.ever_dead:
                if not touched and waits_from is None:
                    waits_from = line.n
            elif line.n < last and not facts.ended_by_operator(line.event_id):
                what = f"{line.event_id} (n {line.n}) before n {last}"
                yield Violation("I5", "left out, although it is not dead", name(lane), what)


def _operated(facts: Facts, event_id: str) -> bool:
    return facts.replays(event_id) > 0 or facts.ended_by_operator(event_id)


def _behind_failed(facts: Facts) -> Iterator[Violation]:
    """A retry that is overtaken shows in the log only if it succeeds in the end; here it shows also if it dies."""
    failed: dict[Lane, list[tuple[int, str]]] = defaultdict(list)
    now: dict[str, str | None] = {}
    for change, lane, n in _placed(facts):
        event_id = change.event_id or ""
        now[event_id] = change.new
        if change.new == "failed":
            heappush(failed[lane], (n, event_id))
        elif change.new == "published":
            heads = failed[lane]
            while heads and now[heads[0][1]] != "failed":
                heappop(heads)
            # What is delivered later itself is judged by the log; within one settle changes come in any order.
            if heads and heads[0][0] < n and heads[0][1] not in facts.delivered:
                what = f"{event_id} (n {n}) before n {heads[0][0]}"
                yield Violation(
                    "I5", "published while an earlier event of its key waited for its retry", name(lane), what
                )


def _behind_dead(facts: Facts) -> Iterator[Violation]:
    """Under "block" and "park" nothing behind a dead head is published before an operator acts."""
    heads: dict[Lane, tuple[int, str]] = {}
    letters = facts.history.final.dead
    for change in facts.changes:
        lane = facts.lane(change.event_id or "")
        if lane is None or facts.policy(lane[0]) == "skip":
            continue
        event_id = change.event_id or ""
        n = facts.witness[event_id].n
        if change.kind == "dead" and change.new is not None:
            buried = str(letters.get(event_id, {}).get("error", "")).startswith(PARKED)
            if not buried and not facts.witness[event_id].scheduled:
                heads.setdefault(lane, (n, event_id))
        elif change.kind in ("dead", "audit") and heads.get(lane, (0, ""))[1] == event_id:
            del heads[lane]
        elif change.kind == "event" and change.new == "published" and facts.has_place(event_id):
            head = heads.get(lane)
            if head is not None and head[0] < n:
                what = f"{event_id} (n {n}) behind the dead n {head[0]}"
                yield Violation("I5", "published, although its key waits for a dead event", name(lane), what)


def _placed(facts: Facts) -> Iterator[tuple[Change, Lane, int]]:
    for change in facts.changes:
        if change.kind != "event" or change.event_id is None:
            continue
        lane = facts.lane(change.event_id)
        if lane is not None and facts.has_place(change.event_id):
            yield change, lane, facts.witness[change.event_id].n


def replay_shape(facts: Facts) -> Iterator[Violation]:
    """I6: whatever is repeated, a consumer that has seen up to n next meets at most the one that follows n."""
    for lane, deliveries in facts.by_key.items():
        ranks: dict[str, int] = {}
        for line in facts.numbers[lane]:
            if line.event_id in facts.delivered or line.event_id not in facts.ever_dead:
                ranks[line.event_id] = len(ranks) + 1
        highest = 0
        for delivery in deliveries:
            rank = ranks[delivery.event_id]
            if rank > highest + 1:
                what = f"{delivery.event_id} (n {facts.witness[delivery.event_id].n}) leaves out {rank - highest - 1}"
                yield Violation("I6", "a delivery goes beyond the next of its key", name(lane), what)
            highest = max(highest, rank)
