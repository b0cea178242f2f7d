"""Conditions and changes that several parts use: instants by the server's clock, errors of an event."""

from collections.abc import Mapping
from typing import Any, Final

from pillarbox.mongo.documents import EARLIEST, MAX_ERROR_LENGTH, MAX_ERRORS, Document
from pillarbox.store import Failure
from pillarbox.stores._errors import error_entry, keepable

ALIVE: Final[Document] = {"$expr": {"$gt": ["$seen_until", "$$NOW"]}}  # of a worker


def later(seconds: float) -> Document:
    """The server's time plus ``seconds``, in a pipeline."""
    return {"$add": ["$$NOW", int(seconds * 1000)]}


def later_or_never(seconds: float | None) -> Any:
    return "$$REMOVE" if seconds is None else later(seconds)


def past(field: str, seconds: float = 0.0) -> Document:
    """The condition that this instant is at least ``seconds`` ago. The bound leaves out what is no instant, and lets an
    index serve it."""
    return {field: {"$gte": EARLIEST}, "$expr": {"$lte": [f"${field}", later(-seconds)]}}


def literal(value: Any) -> Document:
    """A value in a pipeline, where a text that begins with $ would name a field."""
    return {"$literal": value}


def kept_error(error: str) -> str:
    return keepable(error)[:MAX_ERROR_LENGTH]


def history(entry: Mapping[str, Any]) -> Document:
    """The errors of an event with one more. A long history stops growing: its oldest errors help most."""
    errors = {"$ifNull": ["$errors", []]}
    longer = {"$concatArrays": [errors, [literal(entry)]]}
    return {"$cond": [{"$gte": [{"$size": errors}, MAX_ERRORS]}, errors, longer]}


def failed(failure: Failure) -> list[Document]:
    """The change of an event that fails. An error that is noted already is not noted twice."""
    error = kept_error(failure.error)
    noted = {"$and": [{"$eq": ["$status", "failed"]}, {"$eq": ["$attempts", failure.attempts]}]}
    change = {
        "status": "failed",
        "attempts": failure.attempts,
        "next_attempt_at": later_or_never(failure.delay),
        "last_error": literal(error),
        "last_error_at": "$$NOW",
        "errors": {"$cond": [noted, "$errors", history(error_entry(error, failure.attempts))]},
    }
    return [{"$set": change}]
