"""The answers to messages that were sent together, and what is known of partitions that never answer."""

import threading
from collections import Counter
from collections.abc import Callable, Collection
from itertools import count
from typing import Any, Final

# A new connection once after an outage is usual.
_TIMES_IN_VAIN: Final = 2


class Vain:
    """Partitions on which nothing was confirmed, though each time a new connection could be made.

    When a broker refuses a message for a reason that the client does not know, the client connects again and sends the
    message again, without an end, and tells nobody.
    """

    def __init__(self) -> None:
        self._times: Counter[tuple[str, int]] = Counter()

    def note(self, silent: Collection[tuple[str, int]], confirmed: Collection[tuple[str, int]]) -> None:
        """After a wave: where something was confirmed, and where nothing was."""
        for each in confirmed:
            self._times.pop(each, None)
        self._times.update({*silent}.difference(confirmed))

    def refuses(self, partition: tuple[str, int]) -> bool:
        return self._times[partition] >= _TIMES_IN_VAIN


class Wave:
    """The messages that were sent together, and their answers, which the client's thread writes."""

    def __init__(self, size: int) -> None:
        self.sent: list[int] = []
        self.answers: list[Any] = [None] * size
        self.refusal = "", ""  # a topic that takes nothing any more, and the client's name for the reason
        self._arrivals = count(1)
        self._expected = 0
        self._is_complete = threading.Event()

    def reporter(self, index: int) -> Callable[[Any, Any], None]:
        answers, arrivals, is_complete = self.answers, self._arrivals, self._is_complete

        # An exception in here would stop the client for ever. `next` makes the count safe between threads.
        def report(result: Any, _message_id: Any) -> None:
            answers[index] = result
            if next(arrivals) == self._expected:
                is_complete.set()

        return report

    def expect_answers(self) -> None:
        """Nothing more is sent."""
        self._expected = len(self.sent)
        # An answer that came before is counted here; one that comes now sets the event itself.
        if self.answered() == self._expected:
            self._is_complete.set()

    def wait(self, seconds: float) -> bool:
        """Whether every message has its answer."""
        return self._is_complete.wait(seconds)

    def answered(self) -> int:
        return sum(self.answers[index] is not None for index in self.sent)
