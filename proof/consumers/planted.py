"""Planted bugs of consumers: a run switches one on by its name, and the checker must find it."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pillarbox.conformance.probes import probe_of
from pillarbox.consumer.window import Queue, Track, Window
from pillarbox.store import Failure
from proof.planted import inbox_looks_first as look_first


def plant(name: str | None, consumer: Any) -> None:
    """Change this consumer so that it has the bug."""
    if name is not None:
        PLANTED[name](consumer)


def commit_past_an_unfinished_offset(consumer: Any) -> None:
    """A lane is settled up to its last event that is done."""

    def settle(self: Window, track: Track) -> int | None:
        done = [entry for entry in track.entries if entry.done]
        track.entries = deque(entry for entry in track.entries if not entry.done)
        track.bytes -= sum(entry.size for entry in done)
        return max((entry.position for entry in done), default=None)

    Window.settle = settle  # type: ignore[method-assign]


def retry_overtakes_its_key(consumer: Any) -> None:
    """An event that failed lets the next one of its key go first."""
    wait = Window.wait

    def careless(self: Window, queue: Queue, until: float) -> None:
        if len(queue.entries) == 1:
            wait(self, queue, until)
            return
        queue.entries.append(queue.entries.pop(0))
        self.again(queue)

    Window.wait = careless  # type: ignore[method-assign]


def dead_letter_without_an_inbox_row(consumer: Any) -> None:
    """A letter is written, and the event does not count as applied."""
    bury, probe = consumer.store.bury, probe_of(consumer.store)

    async def careless(name: str, failure: Failure, earlier: Sequence[Mapping[str, Any]] = ()) -> bool:
        is_new: bool = await bury(name, failure, earlier)
        await probe.execute("DELETE FROM {inbox} WHERE event_id = :id", id=failure.event.id)
        return is_new

    consumer.store.bury = careless


def inbox_looks_first(consumer: Any) -> None:
    """Two copies at once both find nothing, and both are applied."""
    look_first(None, None)


PLANTED: Final[Mapping[str, Callable[[Any], None]]] = {
    each.__name__: each
    for each in (
        commit_past_an_unfinished_offset,
        retry_overtakes_its_key,
        dead_letter_without_an_inbox_row,
        inbox_looks_first,
    )
}
