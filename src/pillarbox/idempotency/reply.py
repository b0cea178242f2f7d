"""Answers to requests: of the application, stored ones, and problems (RFC 9457)."""

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from pillarbox.errors import ConfigError
from pillarbox.idempotency.work import Stored
from pillarbox.payload import serialise

Headers: TypeAlias = Sequence[tuple[str, str]]

REPLAYED: Final = ("idempotent-replayed", "true")
# Cookies and dates belong to one answer; the others belong to one connection.
_NOT_STORED: Final = frozenset(
    (
        *("set-cookie", "date", "connection", "keep-alive", "proxy-connection", "proxy-authenticate"),
        *("proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
    )
)
_PROBLEMS: Final = "https://github.com/pillarbox/pillarbox/blob/main/docs/howto/idempotency.md"
_REPEAT_ELSEWHERE: Final = (307, 308)
_RETRY_SECONDS: Final = "1"


class Reply(NamedTuple):
    """An answer: status, body, headers as pairs of name and value.

    body: bytes and text as they are, anything else as JSON, None for no body. A Reply that ``run`` returns
    has bytes.
    """

    status: int
    body: Any = None
    headers: Headers = ()

    @property
    def is_kept(self) -> bool:
        """Whether the transaction commits. 307 and 308 ask for the same request, with its key, at another address."""
        return self.status < 400 and self.status not in _REPEAT_ELSEWHERE

    @property
    def is_replayed(self) -> bool:
        """Whether it is the stored answer of an earlier request."""
        return REPLAYED in self.headers


class Refused(Exception):
    """Ends a request's transaction by a rollback, with this reply."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def reply_of(result: Any) -> Reply:
    """The reply that a function's result stands for, with its body as bytes."""
    if not isinstance(result, tuple) or not 2 <= len(result) <= 3 or not isinstance(result[0], int):
        kind = type(result).__name__
        raise ConfigError(f"work returned a value of type {kind}; return a status and a body, or a Reply")
    reply = Reply(*result)
    if reply.body is None:
        return reply._replace(body=b"")
    body, content_type = serialise(reply.body)
    if any(name.lower() == "content-type" for name, _ in reply.headers):
        return reply._replace(body=body)
    return reply._replace(body=body, headers=[("content-type", content_type), *reply.headers])


def stored_headers(headers: Headers) -> str:
    """The headers to store, as JSON."""
    own = {
        name.strip().lower() for header, value in headers if header.lower() == "connection" for name in value.split(",")
    }
    kept = [(name, value) for name, value in headers if name.lower() not in _NOT_STORED and name.lower() not in own]
    return json.dumps(kept, separators=(",", ":"))


def replay(stored: Stored) -> Reply:
    assert stored.status is not None
    headers = [(name, value) for name, value in json.loads(stored.headers or "[]")]
    return Reply(stored.status, stored.body or b"", [*headers, REPLAYED])


def _problem(status: int, anchor: str, title: str, detail: str, *, is_temporary: bool = False) -> Reply:
    body = {"type": f"{_PROBLEMS}#{anchor}", "title": title, "status": status, "detail": detail}
    headers = [("content-type", "application/problem+json")]
    if is_temporary:
        headers.append(("retry-after", _RETRY_SECONDS))
    data = json.dumps(body).encode()
    return Reply(status, data, [*headers, ("content-length", str(len(data)))])


MISSING: Final = _problem(
    400,
    "the-key-is-missing",
    "The idempotency key is missing",
    "This request needs a header Idempotency-Key; send a new UUID, and the same one if you repeat the request.",
)
MALFORMED: Final = _problem(
    400,
    "the-key-is-malformed",
    "The idempotency key is malformed",
    "Send one header Idempotency-Key with 1 to 255 printable ASCII characters, for example a UUID.",
)
BUSY: Final = _problem(
    409,
    "the-request-is-still-running",
    "The request is still running",
    "A request with this idempotency key has not ended yet; send the same request again later.",
    is_temporary=True,
)
OTHER_REQUEST: Final = _problem(
    422,
    "the-key-belongs-to-another-request",
    "The idempotency key belongs to another request",
    "This idempotency key was used for a request with another method, path, query or body; use a new key.",
)
UNAVAILABLE: Final = _problem(
    503,
    "the-database-is-away",
    "The database cannot be used now",
    "The request was not confirmed; send the same request again, with the same idempotency key.",
    is_temporary=True,
)
FAILED: Final = _problem(
    500,
    "the-request-failed",
    "The request failed",
    "The request was not confirmed; the log of the server says why.",
)
UNFINISHED: Final = _problem(
    500,
    "the-answer-is-unknown",
    "The answer is unknown",
    "The transaction of the first request was committed without its answer; its handler must not commit.",
)


def too_large(limit: int) -> Reply:
    return _problem(
        413,
        "the-body-is-too-large",
        "The body is too large",
        f"With an idempotency key a body has at most {limit:,} bytes.",
    )


def answer_too_large(limit: int) -> Reply:
    return _problem(
        500,
        "the-answer-is-too-large",
        "The answer is too large",
        f"The answer has more than {limit:,} bytes, so that nothing was committed; answer with a link, raise "
        "answer_limit, or take this path out of the middleware's paths.",
    )
