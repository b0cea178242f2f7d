"""The log lines about a destination that does not answer, for publishers that wait for it."""

import logging
import threading
import time

from pillarbox.publishers._reminder import Reminder


class Link:
    """Logs once that the destination answers no sender, and once that it is back. Warns of events that wait."""

    def __init__(self, description: str, logger: logging.Logger) -> None:
        self.description = description
        self._logger = logger
        self._is_silent = False
        self._confirmed_at = 0.0
        self._lock = threading.Lock()
        self._reminder = Reminder()

    def waits(self, topic: str, reason: str) -> None:
        """Events wait because of their topic."""
        with self._lock:
            if not self._reminder.is_due(topic):
                return
        self._logger.warning(
            "%s: events for topic %r wait, uncharged: %s",
            self.description,
            topic,
            reason,
            extra={"action": "topic_missing", "destination": self.description, "topic": topic},
        )

    def silent(self, seconds: float, reason: str | None) -> None:
        """A sender has waited for so many seconds."""
        with self._lock:
            if self._is_silent or time.monotonic() - self._confirmed_at < seconds:
                return
            self._is_silent = True
        self._logger.warning(
            "%s has confirmed nothing for %.0f s (%s); waiting, no event is charged",
            self.description,
            seconds,
            reason or "no error was reported",
            extra={"action": "destination_silent", "destination": self.description},
        )

    def confirmed(self) -> None:
        """A message of a sender was confirmed."""
        with self._lock:
            self._confirmed_at = time.monotonic()
            was_silent, self._is_silent = self._is_silent, False
        if was_silent:
            self._logger.warning(
                "%s confirms again",
                self.description,
                extra={"action": "destination_back", "destination": self.description},
            )
