"""The outcomes of JetStream's answers. Pure, but for the log."""

import json
from typing import Any, Final

from pillarbox.publisher import PUBLISHED, Outcome, outage, rejected, retry
from pillarbox.publishers._refusals import Refusals

NO_SUBJECT: Final = (
    "the event has neither a topic nor a routing key, and subject='*' gives it no subject; give events a topic, or the "
    "publisher a default subject"
)
_TOO_LARGE: Final = 10054
_OTHER_STREAM: Final = 10060
_STORE_FAILED: Final = 10077
"""Of a stream that is full."""


class Answers(Refusals):
    """An address is a subject."""

    def not_stored(self, subject: str) -> Outcome:
        """Nobody answers on this subject."""
        return self.refused(
            subject,
            f"no stream of {self.waiting.description} stores subject {subject!r} now; make one, add the subject to "
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
        name = self.waiting.description
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
