"""Whose fault a refusal is, and how long its events wait. Pure, but for the clock and the log."""

import json
import time
from collections.abc import Callable
from typing import Any, Final

from pillarbox.publisher import PUBLISHED, Outcome, outage, rejected, retry
from pillarbox.publishers._link import Link

# The wait of an event whose own subject is refused: as long as it has been refused, within these bounds.
WAIT_SECONDS: Final = (1.0, 30.0)
MOST_NAMES: Final = 10_000

NO_SUBJECT: Final = (
    "the event has neither a topic nor a routing key, and subject='*' gives it no subject; give events a topic, or the "
    "publisher a default subject"
)
_TOO_LARGE: Final = 10054
_OTHER_STREAM: Final = 10060
_STORE_FAILED: Final = 10077
"""Of a stream that is full."""


class Refusals:
    """Of the default subject: an outage. Of an event's own: it waits, uncharged. Shared by all connections."""

    def __init__(self, default: str, waiting: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self.default = default
        self._waiting = waiting
        self._clock = clock
        self._since: dict[str, float] = {}

    def accepted(self, subject: str) -> None:
        """A message for this subject was confirmed."""
        if self._since:
            self._since.pop(subject, None)

    def without_subject(self) -> Outcome:
        self._waiting.waits("", NO_SUBJECT)
        return retry(NO_SUBJECT, charged=False, after_seconds=WAIT_SECONDS[1])

    def refused(self, subject: str, reason: str) -> Outcome:
        """No message for this subject can be stored now."""
        if subject == self.default:
            return outage(reason)
        if len(self._since) >= MOST_NAMES:  # subjects come from events, so there can be any number of them
            self._since.clear()
        now = self._clock()
        shortest, longest = WAIT_SECONDS
        seconds = min(longest, max(shortest, now - self._since.setdefault(subject, now)))
        self._waiting.waits(subject, reason)
        # Someone can make a stream, so the event is not to blame. If no subject has a stream, the server is.
        return retry(reason, charged=False, after_seconds=seconds, ambiguous=True)

    def not_stored(self, subject: str) -> Outcome:
        """Nobody answers on this subject."""
        return self.refused(
            subject,
            f"no stream of {self._waiting.description} stores subject {subject!r} now; make one, add the subject to "
            "one, or wait until its stream has a leader",
        )

    def of_answer(self, subject: str, data: bytes) -> tuple[Outcome, bool]:
        """The outcome that JetStream's answer gives, and whether the stream had the event already."""
        try:
            answer: Any = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not ("error" in answer or answer.get("stream")):
            # Some other program answers on this subject, and no stream stores it.
            return self.not_stored(subject), False
        if "error" in answer:
            return self._of_error(subject, answer["error"]), False
        self.accepted(subject)
        return PUBLISHED, bool(answer.get("duplicate"))

    def _of_error(self, subject: str, error: Any) -> Outcome:
        known = error if isinstance(error, dict) else {}
        number, code, said = known.get("err_code"), known.get("code", 0), str(known.get("description", "no reason"))
        name = self._waiting.description
        if number == _TOO_LARGE:
            return rejected(
                f"{name} refused the event on subject {subject!r}: {said}; raise max_msg_size of the stream, or store "
                "the content elsewhere and send a reference"
            )
        if number == _OTHER_STREAM:
            return self.refused(
                subject, f"another stream of {name} takes subject {subject!r}; correct stream= or the subject"
            )
        if number == _STORE_FAILED:
            return self.refused(
                subject, f"the stream of subject {subject!r} on {name} takes no more: {said}; make room"
            )
        if isinstance(code, int) and code >= 500:
            return outage(f"{name} refused the event on subject {subject!r}: {said}")
        return retry(f"{name} refused the event on subject {subject!r}: {said}", ambiguous=True)
