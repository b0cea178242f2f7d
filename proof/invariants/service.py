"""I15 to I17: recovery, bounds and correct counters."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proof.facts import Facts
from proof.faults import HARMLESS, healed_at
from proof.history import IN_STATE
from proof.violation import Violation

_RECOVERY_BOUND_SECONDS = 10.0
_HEALING_LIMIT_SECONDS = 60.0


@dataclass(slots=True)
class Recovery:
    """Seconds from the end of each fault until the oldest waiting event was below its bound again."""

    seconds: list[float]
    after_healing: float | None  # until it stayed below its bound; None: it never did

    def quantile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def recovery(facts: Facts) -> Recovery:
    run = facts.history.run
    bound = float(facts.settings.get("recovery_bound", _RECOVERY_BOUND_SECONDS))
    samples = sorted(facts.history.samples, key=lambda sample: sample.at)
    young = [sample.at for sample in samples if sample.oldest_seconds < bound]
    end = max(run.ended, samples[-1].at if samples else 0.0)
    seconds = []
    for fault in facts.faults.all:
        if fault.kind not in HARMLESS:
            over = fault.at if fault.kind == "kill" else healed_at(fault)
            place = bisect_left(young, over)
            seconds.append((young[place] if place < len(young) else end) - over)
    # The first sample from which all are below the bound.
    stayed = None
    for sample in reversed(samples):
        if sample.oldest_seconds >= bound:
            break
        stayed = sample.at
    return Recovery(seconds, None if stayed is None else max(0.0, stayed - run.healed))


def liveness(facts: Facts) -> Iterator[Violation]:
    """I15: after the last fault the age of the oldest waiting event falls below its bound and stays there. A relay ends
    when it is told to, and only then.

    Settings: late (relays that did not end in time), broken (processes that ended by themselves).
    """
    for worker in facts.settings.get("late", ()):
        yield Violation("I15", "did not end in time after SIGTERM", worker)
    for process in facts.settings.get("broken", ()):
        yield Violation("I15", "ended by itself", process)
    if not facts.history.samples:
        return
    limit = float(facts.settings.get("healing_limit", _HEALING_LIMIT_SECONDS))
    after = recovery(facts).after_healing
    if after is None:
        oldest = max(facts.history.samples, key=lambda sample: sample.at).oldest_seconds
        yield Violation("I15", "the oldest waiting event stayed above its bound", "run", f"{oldest:.1f} s at the end")
    elif after > limit:
        yield Violation("I15", "the recovery took too long", "run", f"{after:.1f} s, allowed are {limit:g} s")


def bounds(facts: Facts) -> Iterator[Violation]:
    """I16: connections, memory, events in flight and attempts per second in an outage stay below their bounds.

    Settings: connections_bound, memory_bound (MB), in_flight_bound (per worker and stream; else slots * batch),
    outage_attempts_bound (events per second and worker that a publisher gets in an outage of the broker).
    """
    settings, samples = facts.settings, facts.history.samples
    for bound, what, values in (
        ("connections_bound", "connections", [sample.connections for sample in samples]),
        ("memory_bound", "MB of memory", [sample.peak_mb for sample in samples]),
    ):
        if bound in settings and max(values, default=0) > settings[bound]:
            yield Violation("I16", f"more {what} than allowed", "run", f"{max(values):g}, allowed {settings[bound]:g}")
    in_flight = settings.get("in_flight_bound", settings.get("slots", 0) * settings.get("batch", 0))
    for (worker, stream), peak in facts.flights.peak.items():
        if in_flight and stream not in facts.queues and peak > in_flight:
            yield Violation(
                "I16", "more events in flight than allowed", worker, f"{peak} of {stream}, allowed {in_flight}"
            )
    if "outage_attempts_bound" in settings:
        yield from _attempts_in_outages(facts, settings["outage_attempts_bound"])


def _attempts_in_outages(facts: Facts, bound: float) -> Iterator[Violation]:
    tried: Counter[tuple[str, int]] = Counter()
    for trace in facts.history.traces:
        if trace.kind == "publish" and facts.faults.broker.overlapping(trace.at, trace.at) is not None:
            tried[trace.worker, int(trace.at)] += len(trace.event_ids)
    for (worker, second), times in tried.items():
        if times > bound:
            what = f"{times} in second {second}, allowed {bound:g}"
            yield Violation("I16", "more attempts per second in an outage than allowed", worker, what)


def truthful_counters(facts: Facts) -> Iterator[Violation]:
    """I17: the counters of the relays and of the store agree with the history.

    The counters of a killed relay may differ by the events that it had in flight.
    """
    yield from _states(facts)
    counters = facts.history.final.counters
    outcomes: Counter[str] = Counter()
    for trace in facts.history.traces:
        if trace.kind == "published":
            outcomes.update(trace.outcomes)
        elif trace.kind in ("refused", "lost", "take", "give"):
            outcomes[trace.kind] += 1
    outcomes["dead"] = sum(change.kind == "dead" and change.new is not None for change in facts.changes)
    slack = sum(flight.ending == "gone" for flights in facts.flights.interrupted.values() for flight in flights)
    for name in _known(counters):
        if abs(counters[name] - outcomes[name]) > slack:
            what = f"counted {counters[name]}, the history has {outcomes[name]}"
            yield Violation("I17", "a counter is wrong", name, what)


def _states(facts: Facts) -> Iterator[Violation]:
    """Compare the store's own counts at rest with its rows."""
    final = facts.history.final
    rows = Counter(final.states.values())
    rows["dead"] += len(final.dead)
    for name, told in final.counters.items():
        if name.startswith(IN_STATE) and told != rows[name.removeprefix(IN_STATE)]:
            what = f"the store says {told}, there are {rows[name.removeprefix(IN_STATE)]}"
            yield Violation("I17", "a count of the store is wrong", name, what)


def _known(counters: dict[str, int]) -> Sequence[str]:
    known = ("published", "retry", "rejected", "untried", "refused", "lost", "take", "give", "dead")
    return [name for name in known if name in counters]
