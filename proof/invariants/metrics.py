"""I17: the pages of metrics say what the relays did, and the relays counted what the database has."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from heapq import merge

from proof.facts import Facts
from proof.history import Scrape, Trace
from proof.violation import Violation

_DONE = "outbox_done_total"
_FAILED = "outbox_failed_total"
_DIED = "outbox_died_total"
_REFUSED = "outbox_settle_refused_total"
_DUPLICATES = "outbox_duplicates_total"
_TAKEOVERS = "outbox_takeovers_total"


def truthful_metrics(facts: Facts) -> Iterator[Violation]:
    """I17: at each scrape every counter is equal to what its relay had traced until then; also that of a relay that was
    killed later. And what counts as done is published in the database, under the same token.
    """
    yield from _pages(facts)
    yield from _results(facts)


def _pages(facts: Facts) -> Iterator[Violation]:
    counts: dict[str, _Counts] = defaultdict(lambda: _Counts(exactly_once=facts.exactly_once))
    lines: Iterator[Trace | Scrape] = merge(facts.history.traces, facts.history.scrapes, key=lambda line: line.at)
    for line in lines:
        if isinstance(line, Trace):
            counts[line.worker].add(line)
            continue
        for name, told in line.counters.items():
            low, high = counts[line.worker].bounds(name)
            if name.split(" ")[0] in _TRACED and not low <= told <= high and not name.startswith(f"{_FAILED} outage"):
                what = f"{line.worker} told {told:g}, its trace has {low}" + (f" to {high}" if high > low else "")
                yield Violation("I17", "a counter on the page of metrics is wrong", name, what)


_TRACED = frozenset({_DONE, _FAILED, _DIED, _REFUSED, _DUPLICATES, _TAKEOVERS})


class _Counts:
    """What one relay has traced so far.

    Of refused results of a queue stream the store says how many there are, and not which: they are within bounds.
    """

    def __init__(self, *, exactly_once: bool) -> None:
        self._exactly_once = exactly_once
        self._sure: Counter[str] = Counter()
        self._doubtful: Counter[str] = Counter()

    def bounds(self, name: str) -> tuple[int, int]:
        return self._sure[name], self._sure[name] + self._doubtful[name]

    def add(self, line: Trace) -> None:
        stream, found = line.stream, Counter(line.outcomes)
        match line.kind:
            case "published":
                for outcome in ("retry", "rejected"):
                    self._sure[f"{_FAILED} {outcome} {stream}"] += found[outcome]
            case "settled":
                self._sure[f"{_DONE} {stream}"] += found["published"]
                self._sure[f"{_DIED} {stream}"] += found["dead"]
            case "recovered":
                self._sure[f"{_DONE} {stream}"] += found["published"]
            case "refused":
                of_queue = line.shard is None
                counts = self._doubtful if of_queue else self._sure
                counts[f"{_REFUSED} {stream}"] += sum(found.values()) - found["held"]
                if not self._exactly_once:  # else the next owner settles them, and publishes none of them again
                    counts[f"{_DUPLICATES} {stream}"] += found["published"]
                if of_queue:
                    counts[f"{_DONE} {stream}"] += found["published"]
                    counts[f"{_DIED} {stream}"] += found["dead"]
            case "take":
                self._sure[f"{_TAKEOVERS} {stream}"] += found["took_over"]


def _results(facts: Facts) -> Iterator[Violation]:
    if not facts.history.scrapes:
        return
    for trace in facts.history.traces:
        if trace.kind != "settled" or trace.token is None:
            continue
        for event_id, outcome in zip(trace.event_ids, trace.outcomes, strict=False):
            if outcome == "published" and (event_id, trace.token) not in facts.settled:
                what = f"{trace.worker} counted it under token {trace.token}"
                yield Violation("I17", "an event counts as done and is not published in the database", event_id, what)
