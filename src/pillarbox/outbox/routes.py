"""Routes: the rule that decides to which streams an event is written. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from inspect import iscoroutinefunction
from typing import Any, Final, TypeAlias

from pillarbox.errors import ConfigError, InvalidEvent
from pillarbox.event import Event
from pillarbox.limits import check_name

# By the type of an event, where ``*`` stands for any text; or a function of the event.
Routes: TypeAlias = Mapping[str, str | Sequence[str]] | Callable[[Event], str | Sequence[str]]

DEFAULT: Final = "default"
_EXAMPLE: Final = 'routes={"order.*": ["default", "search"]}'
_TYPES_TO_REMEMBER: Final = 1000


class Routed(str):
    """The stream of an event that a rule chose. ``others``: the streams to which the event is written too.

    It is a text, so that an event keeps all its streams in ``_replace``, and loses them with another stream.
    """

    others: tuple[str, ...] = ()

    @classmethod
    def to(cls, first: str, *others: str) -> "Routed":
        routed = cls(first)
        routed.others = others
        return routed


# The stream of an event that is complete only when it is written: its rule is asked then.
ROUTED_LATER: Final = Routed(DEFAULT)


def in_each_stream(event: Event) -> Iterator[Event]:
    """The event as it is written: once for each of its streams."""
    if not isinstance(event.stream, Routed):
        yield event
        return
    for stream in (str(event.stream), *event.stream.others):
        yield event._replace(stream=stream)


def rule_of(routes: Routes | None) -> Callable[[Event], Routed] | None:
    """The rule of an outbox. Raises ConfigError for routes that can be known to be wrong."""
    if routes is None:
        return None
    if isinstance(routes, Mapping):
        return _by_type(routes)
    if not callable(routes):
        raise ConfigError(
            f"routes is of type {type(routes).__name__}; pass a mapping such as {_EXAMPLE}, or a function of the event"
        )
    if iscoroutinefunction(routes):
        raise ConfigError("routes is an async function; pass a plain one, because events are made without waiting")
    return partial(_by_function, routes)


def _by_type(routes: Mapping[str, Any]) -> Callable[[Event], Routed]:
    if not routes:
        raise ConfigError(f"routes is empty; name the streams of a type, as in {_EXAMPLE}, or leave it out")
    table: list[tuple[str, re.Pattern[str], Routed]] = []
    pattern: Any
    for pattern, value in routes.items():
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"routes has {pattern!r} as a type of events; use a text, as in {_EXAMPLE}")
        for earlier, matcher, _ in table:
            if matcher.fullmatch(pattern):
                raise ConfigError(
                    f"routes: {pattern!r} is never reached, because {earlier!r} comes before it and fits the same "
                    "types; put it first"
                )
        try:
            streams = _streams(value)
        except InvalidEvent as error:
            raise ConfigError(f"routes: {pattern!r}: {error}") from None
        table.append((pattern, re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL), streams))

    @lru_cache(_TYPES_TO_REMEMBER)
    def streams_of(type_: str) -> Routed:
        return next((streams for _, matcher, streams in table if matcher.fullmatch(type_)), Routed(DEFAULT))

    return lambda event: streams_of(event.type)


def _by_function(function: Callable[[Event], Any], event: Event) -> Routed:
    try:
        return _streams(function(event))
    except InvalidEvent as error:
        raise InvalidEvent(
            f"the function in routes gave no streams for an event of type {event.type!r}: {error}"
        ) from None


def _streams(value: Any) -> Routed:
    if isinstance(value, str):
        names: Sequence[Any] = (value,)
    elif isinstance(value, list | tuple):
        names = value
    else:
        raise InvalidEvent(f"it is of type {type(value).__name__}; use the name of a stream, or a list of names")
    if not names:
        raise InvalidEvent("the list is empty; an event goes to at least one stream")
    for name in names:
        check_name("stream", name)
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise InvalidEvent(f"it names the stream {twice!r} twice")
    return Routed.to(*map(str.__str__, names))
