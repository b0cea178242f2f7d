"""The contract that operators' actions need, and the errors that they raise."""

from collections.abc import Mapping, Sequence
from typing import Protocol
from uuid import UUID

from pillarbox.errors import PillarboxError
from pillarbox.store import Consumers, Gauges, Insights, Operator


class Desk(Insights, Gauges, Operator, Consumers, Protocol):
    """A store as an operator uses it: to look and to act."""


class NotFound(PillarboxError):
    """The event, stream or check that was asked for does not exist."""


class SeveralStreams(PillarboxError):
    """An id stands in several streams, so it names no single event. ``streams`` has the streams of each such id."""

    def __init__(self, streams: Mapping[UUID, Sequence[str]]) -> None:
        self.streams = streams
        places = [f"{id} is in the streams {', '.join(map(repr, sorted(names)))}" for id, names in streams.items()]
        super().__init__(f"{'; '.join(places)}; choose one with --stream")
