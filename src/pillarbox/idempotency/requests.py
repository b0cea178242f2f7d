"""Requests of frameworks, read for their key and their fingerprint."""

import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pillarbox.drivers.contract import settled
from pillarbox.errors import ConfigError
from pillarbox.idempotency.keys import HEADER
from pillarbox.idempotency.reply import Refused, too_large


class Request(NamedTuple):
    """A request of any other framework, for ``Idempotency.run``. key: the values of its header Idempotency-Key."""

    method: str
    path: str
    query: bytes = b""
    body: bytes = b""
    key: tuple[str, ...] = ()


class Asked(NamedTuple):
    """A request whose body is not read yet. read: gives the body, plain or awaited."""

    request: Request
    read: Callable[[], Any]

    async def complete(self, limit: int) -> Request:
        """The request with its body. Raises Refused with status 413."""
        body = await settled(self.read())
        if len(body) > limit:
            raise Refused(too_large(limit))
        return self.request._replace(body=bytes(body))


def asked_of(request: Any, limit: int) -> Asked:
    """Recognise a request by its attributes, so that no framework is imported."""
    if isinstance(request, Request):
        return Asked(request, lambda: request.body)
    if isinstance(request, Mapping) and "REQUEST_METHOD" in request:
        return Asked(_from_environ(request), lambda: _read_environ(request, limit))
    if hasattr(request, "META") and hasattr(request, "body"):
        return Asked(_from_environ(request.META), lambda: _read_django(request, limit))
    if hasattr(request, "scope") and hasattr(request, "body"):
        return Asked(from_asgi(request.scope), request.body)
    if hasattr(request, "environ") and hasattr(request, "get_data"):
        return Asked(_from_environ(request.environ), request.get_data)
    raise ConfigError(
        f"once.run cannot read a {type(request).__qualname__}; pass a request of Starlette, FastAPI, Flask or Django, "
        "a WSGI environ, or a pillarbox.idempotency.Request"
    )


def from_asgi(scope: Mapping[str, Any]) -> Request:
    name = HEADER.encode()
    values = [value.decode("latin-1") for header, value in scope["headers"] if header.lower() == name]
    return Request(scope["method"], scope["path"], scope.get("query_string", b""), key=tuple(values))


def _from_environ(environ: Mapping[str, Any]) -> Request:
    value = environ.get("HTTP_IDEMPOTENCY_KEY")
    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    return Request(environ["REQUEST_METHOD"], path, query, key=() if value is None else (value,))


def _read_django(request: Any, limit: int) -> bytes:
    if int(request.META.get("CONTENT_LENGTH") or 0) > limit:
        raise Refused(too_large(limit))
    body: bytes = request.body
    return body


def _read_environ(environ: Any, limit: int) -> bytes:
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if length > limit:
        raise Refused(too_large(limit))
    body: bytes = environ["wsgi.input"].read(length) if length else b""
    environ["wsgi.input"] = io.BytesIO(body)  # for the application
    return body
