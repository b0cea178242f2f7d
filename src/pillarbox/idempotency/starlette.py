"""The dependency for FastAPI."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection

from pillarbox.idempotency.middleware import transaction_of

if TYPE_CHECKING:
    from pillarbox.idempotency.idempotency import Idempotency


def dependency(once: "Idempotency") -> Callable[[HTTPConnection], Any]:
    """A function that FastAPI calls with the request."""

    # Awaited, so that FastAPI does not call it in a thread.
    async def session(connection: HTTPConnection) -> Any:
        return transaction_of(once, connection.scope)

    return session
