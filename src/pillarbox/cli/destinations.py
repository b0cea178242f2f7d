"""Destinations and sources in the settings: a URL, or ``module:attribute`` for an object of the user's own code."""

import re
from collections.abc import Collection
from importlib.metadata import entry_points
from typing import Final
from urllib.parse import urlsplit

from pillarbox.errors import ConfigError
from pillarbox.imports import load, load_object
from pillarbox.publisher import Publisher
from pillarbox.source import Source
from pillarbox.urls import PUBLISHERS, SOURCES, publisher_from_url

_OWN: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


def destination(stream: str, to: str, headers: str | None = None) -> Publisher | str:
    """The value of ``to`` for a stream: a URL, or a publisher.

    headers: ``module:attribute`` of a header builder, for a destination that is named by a URL.
    """
    if _is_own(to):
        if headers is not None:
            raise ConfigError(
                f"stream {stream!r}: 'headers' needs a URL as destination; give them to {to} in your code"
            )
        return load(to, Publisher, "a Publisher")  # type: ignore[type-abstract]
    if headers is None:
        return to
    build = load_object(headers, "a header builder")
    if not callable(build):
        raise ConfigError(f"{headers} is a {type(build).__name__}; name a function from an event to its headers")
    return publisher_from_url(to, headers=build)


def source(from_: str) -> Source | str:
    """The value of ``from`` for a consumer: a URL, or a source of the user's own code."""
    if not _is_own(from_, SOURCES, "pillarbox.sources"):
        return from_
    found = load_object(from_, "a Source")
    if callable(found) and not hasattr(found, "receive"):
        found = found()
    if isinstance(found, type) or not hasattr(found, "receive"):
        raise ConfigError(f"{from_} is a {type(found).__name__}; name a Source, or a function that returns one")
    made: Source = found
    return made


def place(to: str) -> str:
    """A destination in two words, without secrets and options: ``kafka localhost:9092``."""
    if _is_own(to):
        return to
    parts = urlsplit(to)
    path = "" if parts.scheme in ("http", "https") else parts.path  # that of a webhook can be its secret
    return f"{parts.scheme} {parts.netloc.rpartition('@')[2]}{path}".strip()


def _is_own(to: str, built_in: Collection[str] = PUBLISHERS.keys(), group: str = "pillarbox.publishers") -> bool:
    schemes = {*built_in, *entry_points(group=group).names}
    return _OWN.fullmatch(to) is not None and urlsplit(to).scheme not in schemes
