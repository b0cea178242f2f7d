"""The answers of ``/livez``, ``/readyz`` and ``/metrics``."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from pillarbox.observe import Exporter, Observer

_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"
_PATHS: Final = ("livez", "readyz", "metrics")
_METHODS: Final = ("GET", "HEAD")

Message = MutableMapping[str, Any]


class Subject(Protocol):
    """What is asked for its health: a relay or a consumer."""

    def troubles(self) -> Sequence[str]:
        """Why a restart would help, a sentence each. An outage of the database or of a destination is no reason."""
        ...

    def missing(self) -> Sequence[str]:
        """The parts that do not serve yet, or not any more; none: it is ready."""
        ...

    def circuits(self) -> Mapping[str, str]:
        """By stream: the state of the circuit in front of its destination."""
        ...


class Answer(NamedTuple):
    """A response of HTTP."""

    status: int
    content_type: str
    body: bytes
    allow: str = ""  # the methods that are allowed, if this one is not


class Health:
    """Answers for one relay or consumer. It is an ASGI application too: ``app.mount("/outbox", relay.health)``.

    observers: ``/metrics`` has the page of the first one that exports metrics.
    """

    def __init__(self, subject: Subject, observers: Iterable[Observer] = ()) -> None:
        self._subject = subject
        self._exporter = next((each for each in observers if isinstance(each, Exporter)), None)

    def answer(self, method: str, path: str, accept: str = "") -> Answer:
        """The response to a request. Only the last part of the path counts, so that it can be mounted anywhere."""
        name = path.partition("?")[0].rpartition("/")[2]
        if name not in _PATHS:
            return _text(404, "there are /livez, /readyz and /metrics")
        if method not in _METHODS:
            return _text(405, "use GET or HEAD")._replace(allow=", ".join(_METHODS))
        if name == "metrics":
            return self._metrics(accept)
        return self._live() if name == "livez" else self._ready()

    def _live(self) -> Answer:
        troubles = list(self._subject.troubles())
        return _json(503 if troubles else 200, {"live": not troubles, "troubles": troubles})

    def _ready(self) -> Answer:
        missing = sorted(self._subject.missing())
        body = {"ready": not missing, "waits_for": missing, "circuits": dict(self._subject.circuits())}
        return _json(503 if missing else 200, body)

    def _metrics(self, accept: str) -> Answer:
        if self._exporter is None:
            return _text(
                501,
                "there are no metrics; install them with: pip install 'pillarbox[prometheus]', and in code pass "
                "observers=[Prometheus()]",
            )
        content_type, body = self._exporter.page(accept)
        return Answer(200, content_type, body)

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"health answers requests of HTTP, not {scope['type']}")
        accept = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"), "")
        answer = self.answer(scope["method"], scope["path"], accept)
        headers = [(name.encode(), value.encode()) for name, value in headers_of(answer)]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})


def headers_of(answer: Answer) -> list[tuple[str, str]]:
    """The headers of a response."""
    headers = [
        ("content-type", answer.content_type),
        ("content-length", str(len(answer.body))),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
    ]
    return [*headers, ("allow", answer.allow)] if answer.allow else headers


def _json(status: int, body: Mapping[str, Any]) -> Answer:
    return Answer(status, _JSON, json.dumps(body).encode() + b"\n")


def _text(status: int, sentence: str) -> Answer:
    return Answer(status, _TEXT, f"{sentence}\n".encode())
