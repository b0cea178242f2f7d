"""Events between the start of their publish and the end of their settle, from the traces."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from proof.faults import Faults
from proof.history import Fault, Trace

# The injector notes a kill a moment before or after it sends the signal.
_KILL_SECONDS = 1.0
_FOREVER = float("inf")
LOST_LEASE = "lost lease"

# Worker, stream, shard and token: one ownership of a shard.
Held = tuple[str, str, int | None, int | None]


@dataclass(slots=True)
class Flight:
    """One event in one call of ``publish``.

    ending: settled, refused, untried, left (its worker stopped cleanly) or gone (its worker died).
    """

    event_id: str
    held: Held
    begun: float
    outcome: str = ""  # empty: the call did not return
    ended: float = _FOREVER
    ending: str = "gone"

    @property
    def worker(self) -> str:
        return self.held[0]


class Flights:
    """All flights, from one walk over the traces.

    Only interrupted flights are kept: published and settled ones cannot cause a copy.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.interrupted: dict[str, list[Flight]] = defaultdict(list)
        self.peak: dict[tuple[str, str], int] = defaultdict(int)  # by worker and stream: the most events at once
        self._lost: dict[Held, float] = {}
        self._open: dict[str, dict[str, Flight]] = defaultdict(dict)
        self._up: dict[tuple[str, str], int] = defaultdict(int)
        for trace in traces:
            self._walk(trace)
        for worker in list(self._open):
            self._close_all(worker, _FOREVER, "gone")

    def _walk(self, trace: Trace) -> None:
        match trace.kind:
            case "publish":
                self._publish(trace)
            case "published":
                flights = self._open[trace.worker]
                for event_id, outcome in zip(trace.event_ids, trace.outcomes, strict=False):
                    flight = flights.get(event_id)
                    if flight is not None:
                        flight.outcome = outcome
                        if outcome == "untried":
                            self._close(flight, trace.at, "untried")
            case "settled" | "refused":
                flights = self._open[trace.worker]
                for event_id in trace.event_ids:
                    flight = flights.get(event_id)
                    if flight is not None:
                        self._close(flight, trace.at, trace.kind)
            case "lost":
                self._lost[_held(trace)] = trace.at
            case "start":
                self._close_all(trace.worker, trace.at, "gone")
            case "stop":
                self._close_all(trace.worker, trace.at, "left")

    def _publish(self, trace: Trace) -> None:
        flights = self._open[trace.worker]
        held = _held(trace)
        for event_id in trace.event_ids:
            if event_id in flights:
                self._close(flights[event_id], trace.at, "left")
            flights[event_id] = Flight(event_id, held, trace.at)
        place = trace.worker, trace.stream
        self._up[place] += len(trace.event_ids)
        self.peak[place] = max(self.peak[place], self._up[place])

    def _close(self, flight: Flight, at: float, ending: str) -> None:
        del self._open[flight.worker][flight.event_id]
        self._up[flight.worker, flight.held[1]] -= 1
        flight.ended, flight.ending = at, ending
        if ending != "settled" or flight.outcome != "published":
            self.interrupted[flight.event_id].append(flight)

    def _close_all(self, worker: str, at: float, ending: str) -> None:
        for flight in list(self._open[worker].values()):
            self._close(flight, at, ending)

    def cause(self, flight: Flight, faults: Faults) -> Fault | str | None:
        """The fault that interrupted this flight."""
        worker = flight.worker
        if flight.ending == "gone":
            kill = faults.of("kill", worker).first_from(flight.begun - _KILL_SECONDS, flight.ended)
            if kill is not None:
                return kill
        stretch = flight.begun, flight.ended
        if flight.ending not in ("settled", "untried"):
            pause = faults.of("stop", worker).overlapping(*stretch)
            if pause is not None:
                return pause
        around = faults.everybody.overlapping(*stretch) or faults.of("hit", worker).overlapping(*stretch)
        if around is not None:
            return around
        was_lost = flight.ending == "refused" or flight.held in self._lost
        return LOST_LEASE if was_lost and flight.ending != "settled" and not faults.clean else None


def _held(trace: Trace) -> Held:
    return trace.worker, trace.stream, trace.shard, trace.token
