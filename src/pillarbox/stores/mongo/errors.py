"""Replaces errors of PyMongo by ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    DuplicateKeyError,
    InvalidOperation,
    InvalidURI,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
)

from pillarbox.errors import ConfigError, DuplicateEvent, SchemaError, StoreDown, StoreError

DUPLICATE: Final = 11000
_AUTHENTICATION: Final = (18, 8000)
_UNAUTHORIZED: Final = 13
_VALIDATION: Final = 121
# No such collection; no such index, where a read names one.
_SCHEMA: Final = (26, 2)
# The server, an election or another transaction was in the way, or the node that had a cursor is gone. The same command
# can succeed a moment later.
_PASSING: Final = frozenset(
    {43, 133, 175, 237, 261, 282, 365}
    | {6, 7, 24, 46, 50, 64, 89, 91, 100, 112, 134, 189, 202, 211, 217, 225, 239, 244, 246, 251, 262, 263, 290, 317}
    | {9001, 10107, 11600, 11601, 11602, 13435, 13436}
)
_PASSING_LABELS: Final = ("TransientTransactionError", "UnknownTransactionCommitResult", "RetryableWriteError")


@contextmanager
def store_errors(place: str) -> Iterator[None]:
    """Replace errors of PyMongo by ours. The error of a bulk write quotes documents, so it is not kept as the cause."""
    try:
        yield
    except (BulkWriteError, OperationFailure) as error:
        code = _code(error)
        if isinstance(error, DuplicateKeyError) or code == DUPLICATE:
            raise DuplicateEvent(
                "an event with this id is in this stream already; give another id, or leave it out"
            ) from None
        raise _refusal(place, error, code) from (None if isinstance(error, BulkWriteError) else error)
    except (InvalidURI, ConfigurationError):
        # Without the driver's words: they can quote the URL.
        raise ConfigError(
            f"{place}: the driver does not understand the URL; check its options, such as replicaSet"
        ) from None
    except (ConnectionFailure, InvalidOperation) as error:
        raise StoreDown(f"{place} cannot be used now ({type(error).__name__}: {_brief(error)})") from error
    except PyMongoError as error:
        if error.timeout:
            raise StoreDown(f"{place} did not answer in time ({type(error).__name__})") from error
        raise StoreError(f"{place}: {type(error).__name__}: {_brief(error)}") from error


def _refusal(place: str, error: PyMongoError, code: int | None) -> Exception:
    words = f"{type(error).__name__} {code}"
    if isinstance(error, OperationFailure) and not isinstance(error, BulkWriteError):
        words = f"{words}: {_brief(error)}"
    if error.timeout or code in _PASSING or any(map(error.has_error_label, _PASSING_LABELS)):
        return StoreDown(f"{place} cannot be used now ({words})")
    if isinstance(error, WriteConcernError):
        return StoreDown(f"{place} does not know yet whether a majority has a write ({words})")
    if code in _AUTHENTICATION:
        return StoreError(f"{place}: user or password refused; correct the URL")
    if code == _UNAUTHORIZED:
        return StoreError(f"{place}: {words}; grant this right to the user of the relay")
    if code == _VALIDATION:
        return StoreError(
            f"{place}: the outbox refuses this document: it has another number of shards by now, or a field of "
            "it has a wrong type; open the store again, or correct the document"
        )
    if code in _SCHEMA:
        return SchemaError(f"{place}: {words}; make the collections with `pillarbox init`")
    return StoreError(f"{place}: {words}")


def _code(error: PyMongoError) -> int | None:
    if isinstance(error, BulkWriteError):
        errors = [*error.details.get("writeErrors", ()), *error.details.get("writeConcernErrors", ())]
        return errors[0].get("code") if errors else error.code
    return getattr(error, "code", None)


def _brief(error: PyMongoError) -> str:
    """The first words of an error. A driver adds the state of every server, or the whole answer."""
    details = getattr(error, "details", None)
    text = str(details.get("errmsg") or error) if isinstance(details, dict) else str(error)
    for end in (", Timeout:", ", full error", " (configured timeouts"):
        text = text.split(end)[0]
    return text[:200]
