"""A database that refuses to settle: what was published waits for it, and nothing more is published meanwhile."""

import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Refusal:
    """Whether the last settle of a stream was refused. Without it each restart would publish the same events again."""

    stream: str
    logger: logging.Logger | None = None
    stands: bool = False

    def refused(self, error: Exception) -> None:
        if not self.stands:
            (self.logger or log).error(
                "stream '%s': published events cannot be settled (%s); nothing more is published until that works",
                self.stream,
                error,
                extra={"action": "settle_failed", "stream": self.stream},
            )
        self.stands = True

    def accepted(self) -> None:
        if self.stands:
            (self.logger or log).warning(
                "stream '%s': settles work again; publishing goes on",
                self.stream,
                extra={"action": "settle_works", "stream": self.stream},
            )
        self.stands = False
