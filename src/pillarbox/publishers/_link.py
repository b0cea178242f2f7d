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
        self._silence: str | None = None
        self._confirmed_at = 0.0
        self._lock = threading.Lock()
        self._reminder = Reminder()

    @property
    def silence(self) -> str | None:
        """Why nothing has been confirmed for some seconds; None: something has."""
        with self._lock:
            return self._silence

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
        reason = reason or "no error was reported"
        with self._lock:
            if self._silence is not None or time.monotonic() - self._confirmed_at < seconds:
                return
            self._silence = f"nothing is confirmed ({reason})"
        self._logger.warning(
            "%s has confirmed nothing for %.0f s (%s); waiting, no event is charged",
            self.description,
            seconds,
            reason,
            extra={"action": "destination_silent", "destination": self.description},
        )

    def confirmed(self) -> None:
        """A message of a sender was confirmed."""
        with self._lock:
            self._confirmed_at = time.monotonic()
            silence, self._silence = self._silence, None
        if silence is not None:
            self._logger.warning(
                "%s confirms again",
                self.description,
                extra={"action": "destination_back", "destination": self.description},
            )
