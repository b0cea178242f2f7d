"""Failures: one of a peer costs its own row, one of ours fails the run."""

from collections.abc import Iterator
from contextlib import contextmanager


class PeerFailedError(Exception):
    """The peer's side of a row did not end as it should."""


@contextmanager
def peer_side() -> Iterator[None]:
    """Errors inside this block are the peer's."""
    try:
        yield
    except Exception as error:
        raise PeerFailedError(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
