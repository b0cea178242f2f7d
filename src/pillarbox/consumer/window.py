"""The window of a consumer: the messages that were received and are not settled yet. Pure.

A lane has its messages in order of their positions, and is settled up to the first one that is not done. The events of
one key in one lane form a queue. A queue is ready, busy (with a call), waiting (for a retry) or stuck (until somebody
frees it); queues know nothing of each other.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from typing import Any, Final, NamedTuple

from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, Outcome, Result
from pillarbox.source import Lane

# A message costs memory beyond its body.
_BYTES_EACH: Final = 500


# When, what, and after how many attempts: as in the history of a dead letter.
ErrorEntry = Mapping[str, Any]


class State(IntEnum):
    """The state of a queue."""

    READY = 0
    BUSY = 1  # its head is in a call, or about to be buried
    WAITING = 2  # for its instant


class Entry:
    """One message. refusal: why its event cannot be handled at all. errors: of its attempts so far, oldest first."""

    __slots__ = ("done", "errors", "event", "position", "refusal", "size", "written_at")

    def __init__(self, position: int, event: Event, size: int, written_at: datetime | None, refusal: str) -> None:
        self.position = position
        self.event = event
        self.size = size
        self.written_at = written_at
        self.refusal = refusal
        self.done = False
        self.errors: tuple[ErrorEntry, ...] = ()


class Queue:
    """The events of one key in one lane, in order; or one event without a key."""

    __slots__ = ("entries", "key", "state", "taken", "track")

    def __init__(self, track: "Track", key: str | None, entry: Entry) -> None:
        self.track = track
        self.key = key
        self.entries = [entry]
        self.state = State.READY
        self.taken = 0

    @property
    def head(self) -> Entry:
        return self.entries[0]


class Track:
    """The part of the window that belongs to one lane.

    busy: queues with a call. failed: why it brings no more messages. leaving: nothing of it is begun any more. gone:
    nothing of it counts any more.
    """

    __slots__ = ("busy", "bytes", "entries", "failed", "gone", "lane", "leaving", "paused", "queues")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.entries: deque[Entry] = deque()
        self.queues: dict[str, Queue] = {}
        self.bytes = 0
        self.busy = 0
        self.failed = ""
        self.paused = self.leaving = self.gone = False

    @property
    def first(self) -> Entry | None:
        """The first message that is not done."""
        return self.entries[0] if self.entries else None


class Decision(NamedTuple):
    """The head of a queue that was not published. The queue stays busy until the caller has decided."""

    queue: Queue
    entry: Entry
    outcome: Outcome


class Window:
    """The messages of all lanes. limit, limit_bytes: of one lane, from its first unfinished message on."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self.tracks: dict[Lane, Track] = {}
        self.held = 0  # queues that wait
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._ready: deque[Queue] = deque()
        self._waiting: list[tuple[float, int, Queue]] = []
        self._count = 0  # so that the heap never compares queues
        self._refused = 0  # entries with a refusal

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def has_refused(self) -> bool:
        """Whether a message is there that cannot be handled at all."""
        return self._refused > 0

    @property
    def next_due(self) -> float | None:
        """The instant of the next retry."""
        while self._waiting and self._waiting[0][2].track.gone:
            heapq.heappop(self._waiting)
        return self._waiting[0][0] if self._waiting else None

    def assign(self, lane: Lane) -> None:
        self.tracks[lane] = Track(lane)

    def leave(self, lane: Lane) -> Track | None:
        """Begin nothing more of this lane."""
        track = self.tracks.get(lane)
        if track is not None:
            track.leaving = True
        return track

    def drop(self, lane: Lane) -> Track | None:
        """Forget a lane: the results of its calls count no more."""
        track = self.tracks.pop(lane, None)
        if track is not None:
            track.leaving = track.gone = True
            self.held -= sum(queue.state is State.WAITING for queue in _queues(track, self._waiting))
            self._refused -= sum(bool(entry.refusal) for entry in track.entries if not entry.done)
        return track

    def add(
        self,
        track: Track,
        position: int,
        event: Event,
        size: int,
        written_at: datetime | None = None,
        refusal: str = "",
    ) -> None:
        """Append a message to its lane."""
        entry = Entry(position, event, size + _BYTES_EACH, written_at, refusal)
        track.entries.append(entry)
        track.bytes += entry.size
        if refusal:
            self._refused += 1
        key = event.key
        if key is None:
            self._ready.append(Queue(track, None, entry))
            return
        queue = track.queues.get(key)
        if queue is None:
            queue = track.queues[key] = Queue(track, key, entry)
            self._ready.append(queue)
        else:
            queue.entries.append(entry)

    def take(self, limit: int) -> list[Queue]:
        """Queues with up to ``limit`` events in all; each has its next ``taken`` events in this call."""
        ready, found = self._ready, []
        while ready and limit > 0:
            queue = ready.popleft()
            if queue.track.leaving:
                continue
            count = min(len(queue.entries), limit)
            if self._refused:
                count = _before_refusal(queue.entries, count)
            queue.state, queue.taken = State.BUSY, count
            queue.track.busy += 1
            limit -= count
            found.append(queue)
        return found

    def finish(self, queues: Sequence[Queue], outcomes: Sequence[Outcome]) -> list[Decision]:
        """Take in the outcomes of a call, and return what it could not do. The outcomes of a lane that is gone are
        dropped."""
        decisions: list[Decision] = []
        if outcomes.count(PUBLISHED) == len(outcomes):
            for queue in queues:
                entries, count = queue.entries, queue.taken
                for entry in entries if count == len(entries) else entries[:count]:
                    entry.done = True
                del entries[:count]
                self._free(queue)
            return decisions
        place = 0
        for queue in queues:
            own = outcomes[place : place + queue.taken]
            place += queue.taken
            decision = self._take_in(queue, own)
            if decision is None or queue.track.gone:
                self._free(queue)
            else:
                decisions.append(decision)
        return decisions

    def _take_in(self, queue: Queue, outcomes: Sequence[Outcome]) -> Decision | None:
        first: tuple[Entry, Outcome] | None = None
        rest = []
        for entry, outcome in zip(queue.entries, outcomes, strict=False):
            if outcome.result is Result.PUBLISHED:
                entry.done = True
            else:
                rest.append(entry)
                first = first or (entry, outcome)
        queue.entries[: len(outcomes)] = rest
        return None if first is None else Decision(queue, *first)

    def again(self, queue: Queue) -> None:
        """The head of a busy queue may be tried again at once."""
        self._free(queue)

    def wait(self, queue: Queue, until: float) -> None:
        """The head of a busy queue is tried again at this instant."""
        queue.track.busy -= 1
        if queue.track.gone:
            return
        queue.state = State.WAITING
        self.held += 1
        self._count += 1
        heapq.heappush(self._waiting, (until, self._count, queue))

    def done(self, queue: Queue) -> None:
        """The head of a busy queue is done for good."""
        entry = queue.entries.pop(0)
        entry.done = True
        if entry.refusal and not queue.track.gone:
            self._refused -= 1
        self._free(queue)

    def wake_due(self, now: float) -> None:
        """Make the queues ready whose instant has come."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= now:
            queue = heapq.heappop(waiting)[2]
            if not queue.track.gone:
                self.held -= 1
                queue.state = State.READY
                self._ready.append(queue)

    def _free(self, queue: Queue) -> None:
        queue.track.busy -= 1
        if queue.track.gone:
            return
        if queue.entries:
            queue.state = State.READY
            self._ready.append(queue)
        elif queue.key is not None:
            del queue.track.queues[queue.key]

    def settle(self, track: Track) -> int | None:
        """The position up to which the lane is newly done; None: nothing new."""
        entries, position = track.entries, None
        while entries and entries[0].done:
            entry = entries.popleft()
            position = entry.position
            track.bytes -= entry.size
        return position

    def is_full(self, track: Track) -> bool:
        return len(track.entries) >= self._limit or track.bytes >= self._limit_bytes

    def has_room(self, track: Track) -> bool:
        """Whether a paused lane has half of its window free again."""
        return len(track.entries) <= self._limit // 2 and track.bytes <= self._limit_bytes // 2


def events_of(queues: Iterable[Queue]) -> Iterator[Event]:
    """The events of a call, in the order of its outcomes."""
    for queue in queues:
        for entry in queue.entries[: queue.taken]:
            yield entry.event


def _before_refusal(entries: Sequence[Entry], count: int) -> int:
    """How many of the first events come before one that is refused; that one goes alone."""
    for number, entry in enumerate(entries[:count]):
        if entry.refusal:
            return max(1, number)
    return count


def _queues(track: Track, waiting: Collection[tuple[float, int, Queue]]) -> Iterator[Queue]:
    return (queue for _, _, queue in waiting if queue.track is track)
