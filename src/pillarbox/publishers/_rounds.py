"""Splits the events of one call into single ones and batches of one handler. Pure.

A key's events may have handlers of both kinds. So a call is handled in rounds: each round has the events of a key up to
the first one for another handler, and the next round goes on behind them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import dropwhile, islice, takewhile
from typing import NamedTuple

from pillarbox.event import Event
from pillarbox.publisher import UNTRIED, Outcome, Result
from pillarbox.publishers._calls import Handler
from pillarbox.publishers.keyed import runs_by_key


class Piece(NamedTuple):
    """Events that are handled together. handler: that of a batch; None: each event by itself."""

    handler: Handler | None
    indexes: Sequence[int]


class Rounds:
    """The events of one call and their outcomes. batch_of: the handler of an event if it takes batches."""

    def __init__(self, events: Sequence[Event], batch_of: Callable[[Event], Handler | None]) -> None:
        self.outcomes: list[Outcome] = [UNTRIED] * len(events)
        self.is_down = False
        self._handlers = [batch_of(event) for event in events]
        self._left = runs_by_key(events)  # of each key that nothing stopped
        self._stops: set[int] = set()

    def next(self) -> list[Piece]:
        """Pieces that can be handled side by side, because each key is in one of them. Empty: that was all."""
        if self.is_down:
            return []
        alone: list[int] = []
        pieces: list[Piece] = []
        filling: dict[int, list[int]] = {}  # by the handler's identity, the batch that has room
        for run in self._left:
            handler = self._handlers[run[0]]
            same = takewhile(partial(self._is_for, handler), run)
            if handler is None:
                alone += same
                continue
            batch = filling.get(id(handler))
            if batch is None or len(batch) == handler.size:
                batch = filling[id(handler)] = []
                pieces.append(Piece(handler, batch))
            batch += islice(same, handler.size - len(batch))
        if alone:
            pieces.append(Piece(None, alone))
        # In the order in which they came.
        return [Piece(piece.handler, sorted(piece.indexes)) for piece in pieces]

    def record(self, piece: Piece, outcomes: Sequence[Outcome]) -> None:
        """The outcomes of a piece."""
        for index, outcome in zip(piece.indexes, outcomes, strict=True):
            self.outcomes[index] = outcome
            self.is_down = self.is_down or outcome.is_outage
            if outcome.result is not Result.PUBLISHED:
                self._stops.add(index)

    def advance(self) -> None:
        """After all pieces of a round: go on behind what was published, and leave keys that something stopped."""
        left = []
        for run in self._left:
            rest = [*dropwhile(lambda index: self.outcomes[index].result is Result.PUBLISHED, run)]
            if rest and rest[0] not in self._stops:
                left.append(rest)
        self._left = left

    def _is_for(self, handler: Handler | None, index: int) -> bool:
        return self._handlers[index] is handler
