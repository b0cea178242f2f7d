"""The settings of a stream."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import ConfigError, InvalidEvent
from pillarbox.event import Mode
from pillarbox.limits import check_name
from pillarbox.publisher import Publisher
from pillarbox.relay.retry import Retry, retry_of


class OnDead(StrEnum):
    """The policy for a key when one of its events dies."""

    SKIP = "skip"  # the next event of the key is published
    BLOCK = "block"  # the key waits until an operator acts
    PARK = "park"  # the later events of the key die too


@dataclass(frozen=True, slots=True)
class Stream:
    """A named flow of events with a destination and limits of its own.

    name: as in ``outbox.add(..., stream=name)``.
    to: a publisher, handlers, or a URL such as ``kafka://localhost:9092?topic=orders``.
    mode: ``ordered`` publishes in order per key; ``queue`` works on single events, for slow handlers without order.
    slots: turns at once in an ordered stream; default: the calls that the publisher serves at once.
    concurrency: events at once in a queue stream, and handlers at once.
    batch, batch_bytes: the most that one turn reads of a shard.
    retry: a policy or its text, such as ``"fixed:30s"``, or a function from the number of attempts so far to the
    seconds until the next one.
    max_attempts: attempts before an event is dead; an event can have a limit of its own.
    on_dead: what happens to the key of an event that died.
    lease: how long a worker that died keeps its shards or events.
    poll, poll_limit: the longest wait between two questions to the database while events come, and at rest.
    stuck: queue streams: a worker that holds an event for longer loses it, even if it renews its lease.

    Durations are texts such as ``"15s"``, or numbers of seconds.
    """

    name: str
    to: Publisher | str
    mode: Mode | Literal["ordered", "queue"] = Mode.ORDERED
    slots: int | None = None
    concurrency: int = 8
    batch: int = 2000
    batch_bytes: int = 4_000_000
    retry: Retry | str = "exponential"
    max_attempts: int = 20
    on_dead: OnDead | Literal["skip", "block", "park"] = OnDead.SKIP
    lease: Duration = "15s"
    poll: Duration = "100ms"
    poll_limit: Duration = "2s"
    stuck: Duration = "10m"
    retry_policy: Retry = field(init=False, repr=False)
    lease_seconds: float = field(init=False, repr=False)
    poll_seconds: float = field(init=False, repr=False)
    poll_limit_seconds: float = field(init=False, repr=False)
    stuck_seconds: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a stream needs a name; the default one is 'default'")
        try:
            check_name("stream", self.name)
        except InvalidEvent as error:
            raise ConfigError(f"the name of a stream cannot be used: {error}") from None
        for setting, kind in (("mode", Mode), ("on_dead", OnDead)):
            value = getattr(self, setting)
            try:
                object.__setattr__(self, setting, kind(value))
            except ValueError:
                known = ", ".join(kind)
                raise ConfigError(f"stream '{self.name}': {setting} is {value!r}; use one of: {known}") from None
        if isinstance(self.to, list | tuple | set | Mapping):
            raise ConfigError(
                f"stream '{self.name}': a stream has one destination, so that it can wait for it alone; give each "
                "destination a stream, and write events to several with Outbox(routes=...)"
            )
        if not isinstance(self.to, str | Publisher):
            raise ConfigError(
                f"stream '{self.name}': a {type(self.to).__name__} is no destination; pass a URL, a subclass of "
                "pillarbox.publisher.Publisher, or register functions with Handlers"
            )
        for setting, low, high in (
            ("slots", 1, 1024),
            ("concurrency", 1, 10_000),
            ("batch", 1, 100_000),
            ("batch_bytes", 1, 1 << 30),
            ("max_attempts", 1, 1_000_000),
        ):
            value = getattr(self, setting)
            if value is None and setting == "slots":
                continue
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"stream '{self.name}': {setting} is {value}; use {low} to {high}")
        try:
            object.__setattr__(self, "retry_policy", retry_of(self.retry))
        except ConfigError as error:
            raise ConfigError(f"stream '{self.name}': {error}") from None
        for setting, least, most in (
            ("lease", "100ms", "24h"),
            ("poll", "1ms", "10s"),
            ("poll_limit", "1ms", "10s"),
            ("stuck", "100ms", "7d"),
        ):
            seconds = seconds_of(f"stream '{self.name}': {setting}", getattr(self, setting), least, most)
            object.__setattr__(self, f"{setting}_seconds", seconds)
        if self.poll_limit_seconds < self.poll_seconds:
            raise ConfigError(
                f"stream '{self.name}': poll_limit ({self.poll_limit}) is below poll ({self.poll}); "
                "raise the one or lower the other"
            )
