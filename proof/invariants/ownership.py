"""I7 to I9: ownership, fencing and finality."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from proof.facts import Facts
from proof.history import Change
from proof.violation import Violation

# The coarsest resolution of an instant: MongoDB keeps milliseconds.
_RESOLUTION_SECONDS = 0.001
_WORKED = frozenset({"pending", "failed", "held", "processing"})


def exclusion(facts: Facts) -> Iterator[Violation]:
    """I7: a shard, or an event of a queue stream, has one owner at a time. No token is granted twice. A stale owner
    reads nothing."""
    yield from _leases(facts)
    yield from _row_leases(facts)
    yield from _stale_reads(facts)


def _leases(facts: Facts) -> Iterator[Violation]:
    before: dict[tuple[str, int | None], Change] = {}
    granted: dict[tuple[str, int | None], set[int]] = defaultdict(set)
    for change in facts.changes:
        if change.kind != "lease" or change.token is None:
            continue
        last = before.get((change.stream, change.shard))
        before[change.stream, change.shard] = change
        is_new = change.token not in granted[change.stream, change.shard]
        granted[change.stream, change.shard].add(change.token)
        if last is None or last.token is None:
            continue
        subject = f"{change.stream}/{change.shard}"
        what = f"{last.owner} (token {last.token}), then {change.owner} (token {change.token})"
        if change.token != last.token and not is_new:
            yield Violation("I7", "a token of a lease was granted twice", subject, what)
        elif change.token == last.token:
            if change.owner is not None and change.owner != last.owner:
                yield Violation("I7", "a lease has another owner under the same token", subject, what)
        elif last.owner is not None and change.at < (last.until or 0.0) - _RESOLUTION_SECONDS:
            early = f"{what}, {(last.until or 0.0) - change.at:.3f} s early"
            yield Violation("I7", "a lease was taken from an owner whose time had not run out", subject, early)


def _row_leases(facts: Facts) -> Iterator[Violation]:
    tokens: dict[str, int] = {}  # the last one of each event
    granted: set[tuple[str, int]] = set()
    for change in facts.changes:
        if change.kind != "event" or change.stream not in facts.queues or change.event_id is None:
            continue
        if change.token is None:
            continue
        last = tokens.get(change.event_id, -1)
        claimed = change.new == "processing" and change.old != "processing"
        if claimed and (change.event_id, change.token) in granted:
            yield Violation("I7", "a token of a claim was granted twice", change.event_id, f"token {change.token}")
        elif change.old == change.new == "processing" and change.token != last:
            what = f"token {last}, then {change.token}"
            yield Violation("I7", "an event was claimed while another worker had it", change.event_id, what)
        tokens[change.event_id] = change.token
        granted.add((change.event_id, change.token))


def _stale_reads(facts: Facts) -> Iterator[Violation]:
    begun: dict[tuple[str, str, int | None], float] = {}
    for trace in facts.history.traces:
        shard = trace.worker, trace.stream, trace.shard
        if trace.kind == "read_begin":
            begun[shard] = trace.at
        elif trace.kind == "read" and trace.event_ids and trace.token is not None:
            newer = facts.superseded.get((trace.stream, trace.shard, trace.token), float("inf"))
            # A read that began before the newer token was granted is allowed.
            if begun.get(shard, 0.0) > newer:
                what = f"{trace.worker} read {len(trace.event_ids)} events of {trace.stream}/{trace.shard}"
                yield Violation("I7", "a read returned events to a stale token", trace.event_ids[0], what)


def fencing(facts: Facts) -> Iterator[Violation]:
    """I8: only the owner of the lease settles an event.

    The log has the token of the lease at the moment of a change. The trace has the token with which a worker settled.
    In a queue stream a rescue also makes events fail or die.
    """
    tried: dict[str, set[int]] = defaultdict(set)
    accepted: set[tuple[str, int]] = set()
    begun: dict[tuple[str, str, int | None], float] = {}
    for trace in facts.history.traces:
        if trace.token is None or trace.kind not in ("settle", "settled", "recovering", "recovered"):
            continue
        shard = trace.worker, trace.stream, trace.shard
        if trace.kind in ("settle", "recovering"):
            begun[shard] = trace.at
            for event_id in trace.event_ids:
                tried[event_id].add(trace.token)
            continue
        accepted.update((event_id, trace.token) for event_id in trace.event_ids)
        newer = facts.superseded.get((trace.stream, trace.shard, trace.token), float("inf"))
        if begun.get(shard, 0.0) > newer and trace.event_ids:
            what = f"{trace.worker} settled {len(trace.event_ids)} events with token {trace.token}"
            yield Violation("I8", "a settle with a stale token was accepted", trace.event_ids[0], what)
    changed: set[tuple[str, int]] = set()
    inconclusive: set[str] = set()  # ids of changes without a token
    for change in facts.changes:
        if not _is_settled(change) or change.event_id is None:
            continue
        if change.token is None:
            inconclusive.add(change.event_id)
            continue
        changed.add((change.event_id, change.token))
        tokens = tried.get(change.event_id)
        what = f"{change.old} to {change.new} under token {change.token}"
        if tokens is None:
            if change.old != "processing" and facts.history.traces:
                yield Violation("I8", "changed, although no worker settled it", change.event_id, what)
        elif change.token not in tokens and (change.stream not in facts.queues or change.new == "published"):
            with_tokens = f"{what}, settled with {', '.join(map(str, sorted(tokens)))}"
            yield Violation("I8", "changed by a worker that no longer had the lease", change.event_id, with_tokens)
    for event_id, token in accepted - changed:
        if changed and event_id not in inconclusive and event_id in facts.witness:
            what = f"token {token}"
            yield Violation("I8", "a settle was accepted, but under its token nothing changed", event_id, what)


def _is_settled(change: Change) -> bool:
    """Whether only a settle makes this change. Re-entries and refunds end at pending, prunes start at published."""
    return change.kind == "event" and change.old in _WORKED and change.new not in ("pending", "processing")


def finality(facts: Facts) -> Iterator[Violation]:
    """I9: a published or dead event changes again only after an audited replay."""
    inserts: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for change in facts.changes:
        if change.kind != "event" or change.event_id is None:
            continue
        if change.old is None:
            inserts[change.event_id] += 1
            again[change.event_id] += inserts[change.event_id] > 1
        elif change.old == "published" and change.new is not None:
            again[change.event_id] += 1
    for event_id, times in again.items():
        if times > facts.replays(event_id):
            what = f"{times} times, replayed {facts.replays(event_id)} times"
            yield Violation("I9", "came back without an operator's replay", event_id, what)
    yield from _read_again(facts)


def _read_again(facts: Facts) -> Iterator[Violation]:
    begun: dict[tuple[str, str, int | None], float] = {}
    confirmed: set[tuple[str, str]] = set()
    over: dict[str, float] = {}
    for trace in facts.history.traces:
        shard = trace.worker, trace.stream, trace.shard
        match trace.kind:
            case "read_begin":
                begun[shard] = trace.at
            case "published":
                for event_id, outcome in zip(trace.event_ids, trace.outcomes, strict=False):
                    if outcome == "published":
                        confirmed.add((trace.worker, event_id))
                    else:
                        confirmed.discard((trace.worker, event_id))
            case "settled" | "recovered":
                for event_id in trace.event_ids:
                    if trace.kind == "recovered" or (trace.worker, event_id) in confirmed:
                        over[event_id] = trace.at
            case "read":
                for event_id in trace.event_ids:
                    confirmed.discard((trace.worker, event_id))  # confirmed earlier, but its settle was refused
                    if begun.get(shard, 0.0) > over.get(event_id, float("inf")) and not facts.replays(event_id):
                        what = f"by {trace.worker}"
                        yield Violation("I9", "read again after it was settled as published", event_id, what)
