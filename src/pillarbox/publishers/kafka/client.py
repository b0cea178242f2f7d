"""One Kafka producer with its delivery reports."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from pillarbox.kafka.errors import config_error

_EXPECTED: Final = ("FATAL", "CONFWARN", "TXNERR")


class _Expected(logging.Filter):
    # The gapless guarantee reports a refused batch as a fatal error, and a fenced transaction is one. The senders
    # handle and report them.
    def filter(self, record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and record.args and record.args[0] in _EXPECTED)


_client_logger = logging.getLogger("pillarbox.publishers.kafka.client")
_client_logger.addFilter(_Expected())


class Client:
    """A producer with its delivery reports: for message i ``confirmed[i]`` is 1, or ``errors[i]`` is set."""

    def __init__(self, config: Mapping[str, Any], sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        self.confirmed = bytearray()
        self.errors: dict[int, Any] = {}
        self.fatal: Any = None
        self.login_error: str | None = None
        self.last_error: str | None = None
        self._reporters: list[Callable[[Any, Any], None]] = []
        try:
            self.producer: Any = Producer({**config, "error_cb": self._note, "logger": _client_logger})
        except (KafkaException, TypeError, ValueError) as error:
            raise config_error(error) from error
        self.produce: Any = self.producer.produce

    def begin(self, count: int) -> list[Callable[[Any, Any], None]]:
        """Forget the last call. Returns the reporters of the messages 0 to count-1."""
        self.confirmed[:] = bytes(count)
        self.errors.clear()
        # Made once and kept: a closure per message would cost as much as a header.
        while len(self._reporters) < count:
            self._reporters.append(_reporter(self.confirmed, self.errors, len(self._reporters)))
        return self._reporters

    def flush(self, seconds: float) -> int:
        """Send without lingering and serve reports. Returns how many messages have none yet."""
        try:
            return int(self.producer.flush(seconds))
        except (KafkaException, SystemError) as error:
            # The library raises a fatal error while it runs the reporters, as if they had failed.
            cause = error if isinstance(error, KafkaException) else error.__cause__
            self.fatal = cause.args[0] if isinstance(cause, KafkaException) else KafkaError(KafkaError._FATAL)
            return len(self.producer)

    def purge(self, *, in_flight: bool) -> None:
        self.producer.purge(in_flight=in_flight)

    def _note(self, error: Any) -> None:
        self.last_error = error.str()
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED):
            self.login_error = error.str()


def _reporter(confirmed: bytearray, errors: dict[int, Any], index: int) -> Callable[[Any, Any], None]:
    # No calls in here: it may run while the library has a fatal error pending, and any call would then fail.
    def report(error: Any, _message: Any) -> None:
        if error is None:
            confirmed[index] = 1
        else:
            errors[index] = error

    return report
