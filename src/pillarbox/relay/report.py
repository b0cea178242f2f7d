"""Log lines about events that failed or died: each with its reason, and not more than an operator can read."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pillarbox.event import Event
from pillarbox.relay.subject import Subject
from pillarbox.store import PARKED, ClaimResults, Failure, HoldMode, Settlement

log = logging.getLogger(__name__)

_LINES: Final = 10  # within so many seconds:
_SECONDS: Final = 10.0
_LONGEST_KEY: Final = 100
_MOST_KEYS: Final = 10_000


@dataclass(slots=True)
class Limit:
    """Lets the first lines of each window pass and counts the others. Pure: the caller passes the time."""

    lines: int = _LINES
    seconds: float = _SECONDS
    _begun: float | None = None
    _passed: int = 0
    _withheld: int = 0

    def passes(self, now: float) -> bool:
        """Whether one more line may be written. Ask ``withheld`` first, which ends an old window."""
        if self._begun is None:
            self._begun = now
        if self._passed < self.lines:
            self._passed += 1
            return True
        self._withheld += 1
        return False

    def withheld(self, now: float, *, at_once: bool = False) -> int:
        """End a window that is over (``at_once``: in any case), and return the number of lines it held back."""
        if self._begun is None or (now - self._begun < self.seconds and not at_once):
            return 0
        count, self._begun, self._passed, self._withheld = self._withheld, None, 0, 0
        return count


@dataclass(slots=True)
class Report:
    """Tells of the events of one stream, or of one consumer, after the store has written what became of them.

    A failure is a warning, and a death is an error that names the command which shows it. Both say the error, and never
    the payload.
    """

    subject: Subject
    max_attempts: int
    logger: logging.Logger | None = None
    letters: str = ""  # where dead letters are, if no command shows them
    clock: Callable[[], float] = time.monotonic
    _failures: Limit = field(default_factory=Limit)
    _deaths: Limit = field(default_factory=Limit)
    _parked: set[str] = field(default_factory=set)  # keys whose later deaths were told

    def settled(self, settlement: Settlement) -> None:
        """A turn of an ordered stream was settled."""
        for failure in settlement.failed:
            hold = settlement.hold_keys.get(failure.event.key or "")
            delay = failure.delay if hold is None else hold.delay
            self.failed(failure, delay, charged=failure.attempts > failure.event.attempts)
        for failure in settlement.dead:
            if failure.error == PARKED and failure.event.key is not None:
                self._died_behind(failure.event.key)
                continue
            hold = settlement.hold_keys.get(failure.event.key or "")
            self.died(failure, None if hold is None else hold.mode)

    def settled_claims(self, results: ClaimResults) -> None:
        """Leased events of a queue stream were settled. Their claims have charged an attempt already."""
        for failure in results.failed:
            self.failed(failure, failure.delay, charged=failure.attempts >= failure.event.attempts)
        for failure in results.dead:
            self.died(failure)

    @property
    def traces(self) -> bool:
        """Whether the log wants a line for each step of a turn."""
        return (self.logger or log).isEnabledFor(logging.DEBUG)

    def trace(self, action: str, sentence: str, **numbers: int) -> None:
        """Write a line about a step of a turn, at debug. The sentence has a place for each of its numbers."""
        if self.traces:
            self._write(logging.DEBUG, action, sentence.format(**numbers), dict(numbers))

    def summarise(self, *, at_once: bool = False) -> None:
        """Write the number of lines that were held back, if their time is over (``at_once``: in any case)."""
        now = self.clock()
        if count := self._failures.withheld(now, at_once=at_once):
            self._write(
                logging.WARNING, "failed", f"{count:,} more failures in the last {_SECONDS:g} s", {"count": count}
            )
        if count := self._deaths.withheld(now, at_once=at_once):
            self._write(
                logging.ERROR,
                "dead",
                f"{count:,} more events died in the last {_SECONDS:g} s; {self._see('list')}",
                {"count": count},
            )

    def failed(self, failure: Failure, delay: float | None, *, charged: bool) -> None:
        """An event failed, and is tried again after ``delay`` seconds."""
        self.summarise()
        if not self._failures.passes(self.clock()):
            return
        number = f"attempt {failure.attempts} of {self._limit(failure)}"
        what = f"failed, {number}" if charged else "has to wait, no attempt is charged"
        following = "" if delay is None else f", next in {_seconds(delay)}"
        self._write(
            logging.WARNING,
            "failed",
            f"{_name(failure.event)} {what}{following}: {_line(failure.error)}",
            _fields(failure),
        )

    def blocked(self, failure: Failure, delay: float) -> None:
        """An event of a consumer has no attempts left, and its key waits for it."""
        self.summarise()
        if self._deaths.passes(self.clock()):
            self._write(
                logging.ERROR,
                "blocked",
                f"{_name(failure.event)} blocks its key after {failure.attempts} attempts, next in {_seconds(delay)}: "
                f"{_line(failure.error)}",
                _fields(failure),
            )

    def died(self, failure: Failure, mode: HoldMode | None = None) -> None:
        """An event is dead. mode: of its key."""
        self.summarise()
        if not self._deaths.passes(self.clock()):
            return
        event, attempts = failure.event, failure.attempts
        is_over = attempts >= self._limit(failure)
        what = f"is dead after {attempts} {'attempt' if attempts == 1 else 'attempts'}"
        consequence = {
            HoldMode.BLOCKED: "; its key waits until you replay or discard it",
            HoldMode.PARKED: "; later events of its key die too, until you replay or discard it",
        }
        self._write(
            logging.ERROR,
            "dead",
            f"{_name(event)} {what if is_over else 'was rejected and is dead'}: {_line(failure.error)}"
            f"{consequence.get(mode, '') if mode else ''}; {self._see(f'show {event.id}')}",
            _fields(failure),
        )

    def _died_behind(self, key: str) -> None:
        if key in self._parked:
            return
        if len(self._parked) >= _MOST_KEYS:
            self._parked.clear()
        self._parked.add(key)
        self.summarise()
        if self._deaths.passes(self.clock()):
            self._write(
                logging.ERROR,
                "dead",
                f"events of key {_line(key)[:_LONGEST_KEY]} die, because an earlier one is dead and the stream parks; "
                f"{self._see('list')}",
                {},
            )

    def _limit(self, failure: Failure) -> int:
        return failure.event.max_attempts or failure.limit or self.max_attempts

    def _see(self, command: str) -> str:
        if self.letters:
            return f"see {self.letters}"
        # An event of a relay has one dead letter, so its id is enough.
        flag = f" {self.subject.flag}" if command == "list" or self.subject.kind == "consumer" else ""
        return f"see: pillarbox dead {command}{flag}"

    def _write(self, level: int, action: str, sentence: str, fields: dict[str, object]) -> None:
        (self.logger or log).log(level, "%s: %s", self.subject, sentence, extra=self.subject.fields(action, **fields))


def _name(event: Event) -> str:
    key = "" if event.key is None else f" key {_line(event.key)[:_LONGEST_KEY]}"
    return f"{_line(event.type)} {event.id}{key}"


def _fields(failure: Failure) -> dict[str, object]:
    return {"event_id": str(failure.event.id), "attempts": failure.attempts}


def _seconds(delay: float) -> str:
    if delay < 100:
        return f"{delay:.1f} s" if delay < 10 else f"{delay:.0f} s"
    return f"{delay / 60:.0f} min"


def _line(text: str) -> str:
    """On one line: types, keys and errors come from outside, and could otherwise pretend to be a log line."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
