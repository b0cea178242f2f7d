"""Errors of test servers; each message names the remedy."""

from __future__ import annotations


class ServerError(Exception):
    """A server could not be brought into the wanted state."""


class MissingError(ServerError):
    """Something that the server needs is not on this machine and could not be fetched."""


class StartError(ServerError):
    """A server did not become ready; the message carries the end of its own log."""
