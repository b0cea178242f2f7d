"""Destinations in the settings: a URL, or ``module:attribute`` for a publisher of the user's own code."""

import re
from importlib.metadata import entry_points
from typing import Final
from urllib.parse import urlsplit

from pillarbox.errors import ConfigError
from pillarbox.imports import load, load_object
from pillarbox.publisher import Publisher
from pillarbox.urls import PUBLISHERS, publisher_from_url

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


def place(to: str) -> str:
    """A destination in two words, without secrets and options: ``kafka localhost:9092``."""
    if _is_own(to):
        return to
    parts = urlsplit(to)
    return f"{parts.scheme} {parts.netloc.rpartition('@')[2]}{parts.path}".strip()


def _is_own(to: str) -> bool:
    schemes = {*PUBLISHERS, *entry_points(group="pillarbox.publishers").names}
    return _OWN.fullmatch(to) is not None and urlsplit(to).scheme not in schemes
