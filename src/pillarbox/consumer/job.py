"""A job: a consumer with its source, destination and rules, for one worker."""

import logging
from dataclasses import dataclass, field

from pillarbox.consumer.decoder import Decoder
from pillarbox.consumer.letters import Letters
from pillarbox.observe import Observers
from pillarbox.publisher import Publisher
from pillarbox.relay.plan import Rules
from pillarbox.relay.report import Report
from pillarbox.relay.subject import Subject
from pillarbox.source import Source


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a runner needs. letters: None with ``on_dead="block"``: a dead event blocks its key."""

    name: str
    worker: str
    source: Source
    publisher: Publisher
    letters: Letters | None
    rules: Rules
    decode: Decoder
    window: int
    window_bytes: int
    grace_seconds: float
    observers: Observers
    logger: logging.Logger | None = None
    letters_at: str = ""  # where dead letters are, if not in the store
    subject: Subject = field(init=False)
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "subject", Subject("consumer", self.name))
        report = Report(self.subject, self.rules.max_attempts, self.logger, letters=self.letters_at)
        object.__setattr__(self, "report", report)
