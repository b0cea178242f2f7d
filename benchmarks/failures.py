"""Whose failure it is: a peer's costs its own row, ours is one of the run."""

from collections.abc import Iterator
from contextlib import contextmanager


class PeerFailedError(Exception):
    """The peer's side of a row did not end as it should."""


@contextmanager
def peer_side() -> Iterator[None]:
    """Around what only the peer does."""
    try:
        yield
    except Exception as error:
        raise PeerFailedError(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """What is said of an error in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
