"""An assignment, ``job`` for short: one stream with its store, publisher and rules, for one worker."""

import logging
from dataclasses import dataclass, field

from pillarbox.observe import Observers
from pillarbox.publisher import Publisher
from pillarbox.relay.plan import Rules
from pillarbox.relay.report import Report
from pillarbox.relay.stream import Stream
from pillarbox.relay.subject import stream_named
from pillarbox.store import Store


@dataclass(frozen=True, slots=True)
class Assignment:
    """Everything that a worker needs to serve one stream."""

    store: Store
    stream: Stream
    publisher: Publisher
    rules: Rules
    worker: str  # its name
    grace_seconds: float
    observers: Observers
    logger: logging.Logger | None = None  # None: one for each module
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "report", Report(stream_named(self.stream.name), self.stream.max_attempts, self.logger)
        )
