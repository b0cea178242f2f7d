"""Events to HTTP endpoints: signed webhooks, one request for each event, in order per key."""

import asyncio
import ssl
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

from pillarbox.batch import Batch
from pillarbox.durations import Duration, seconds_of
from pillarbox.envelopes import Envelope, HeaderBuilder, HttpMessage, envelope_named, http
from pillarbox.errors import ConfigError, MissingExtra, Outage
from pillarbox.event import Event
from pillarbox.finding import Finding, failed, ok, warning
from pillarbox.hints import hint
from pillarbox.imports import load_object
from pillarbox.publisher import UNTRIED, Outcome, Publisher, PublisherFeatures, outage
from pillarbox.tasks import PerLoop

try:
    from pillarbox.publishers.http.call import Call, Chooser, OnGone, Sending
    from pillarbox.publishers.http.client import Client, Times
    from pillarbox.publishers.http.endpoint import Endpoint
    from pillarbox.publishers.http.guard import Guard
    from pillarbox.publishers.http.state import States
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("aiohttp", "yarl"):
        raise
    raise MissingExtra("HttpPublisher", "http") from error

__all__ = ["Endpoint", "HttpPublisher"]

_OPTIONS: Final = (
    "secret", "query", "envelope", "headers", "source", "concurrency", "max_bytes", "timeout", "connect_timeout",
    "cafile", "certfile", "keyfile",
)  # fmt: skip
_OF_CUSTOMERS: Final = ("endpoints", "on_gone", "ports", "networks", "patience")
_NUMBERS: Final = ("concurrency", "max_bytes")
_CALLS: Final = 16
_FIRST_BATCH: Final = 100
_CONCURRENCY: Final = (16, 4)  # of the only endpoint, and of each of several
# Most requests on their way at a close are answered within this time, and then need no copy.
_GRACE_SECONDS: Final = 1.0


class HttpPublisher(Publisher):
    """Posts each event to one URL, or to the endpoint that a function names for it.

    url: ``https://host/path``, with its own query if it has one. It may lead anywhere.
    secret: ``whsec_...``, or several: each message has a signature of Standard Webhooks for each. Empty: none.
    endpoints: in place of ``url`` and ``secret``: a function, plain or async, from an event to an Endpoint, or None if
    it has none. An endpoint is taken for a customer's, which may lead to public addresses only, unless it is trusted.
    on_gone: called with an endpoint that answered 410, which wants no events any more.
    ports: those that a customer's endpoint may use. networks: private ones that it may lead into.
    envelope: an envelope, one of ``pillarbox.envelopes.ENVELOPES``, or a function from an event to an HttpMessage.
    headers: the header builder for a named envelope.
    source: the ``source`` attribute of CloudEvents.
    concurrency: requests at once to an endpoint; default: 16 to the only one, 4 to each of several.
    max_bytes: the largest body that is sent.
    timeout: how long an endpoint may take to answer.
    connect_timeout: how long to wait for a connection.
    patience: how long the events of other endpoints wait for one. The request then goes on without them.
    cafile: the certificates to trust; default: the system's.
    certfile: this client's own certificate.
    keyfile: the key of that certificate.
    """

    options = frozenset((*_OPTIONS, *_OF_CUSTOMERS)) - {"query"}

    def __init__(
        self,
        url: str = "",
        *,
        secret: str | Sequence[str] = (),
        endpoints: Chooser | None = None,
        on_gone: OnGone | None = None,
        ports: Collection[int] = (443,),
        networks: Sequence[str] = (),
        envelope: str | Envelope | Callable[[Event], HttpMessage] = "raw",
        headers: HeaderBuilder | None = None,
        source: str = "/pillarbox",
        concurrency: int | None = None,
        max_bytes: int = 1024 * 1024,
        timeout: Duration = "20s",
        connect_timeout: Duration = "5s",
        patience: Duration = "1s",
        cafile: str = "",
        certfile: str = "",
        keyfile: str = "",
    ) -> None:
        if bool(url) == (endpoints is not None):
            raise ConfigError("give an HTTP publisher a URL, or endpoints= with a function that names an endpoint")
        if endpoints is not None and secret:
            raise ConfigError("secret= goes with a URL; give each Endpoint its own")
        if on_gone is not None and endpoints is None:
            raise ConfigError("on_gone= goes with endpoints=; a URL that answers 410 is reported as an outage")
        for name, value in (("concurrency", concurrency), ("max_bytes", max_bytes)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} lets no event through; use 1 or more")
        if isinstance(envelope, str):
            envelope = envelope_named(envelope, headers=headers, source=source)
        elif headers is not None:
            raise ConfigError("headers= goes with a named envelope; give the header builder to your envelope")
        self._message_of = http(envelope) if isinstance(envelope, Envelope) else envelope
        self._only = Endpoint(url, secret, trusted=True) if url else None
        self._endpoints, self._on_gone = endpoints, on_gone
        self._guard = Guard(ports, networks)
        self._concurrency = concurrency or _CONCURRENCY[0 if url else 1]
        self._max_bytes = max_bytes
        self._times = Times(
            seconds_of("timeout", timeout, "1ms", "1h"), seconds_of("connect_timeout", connect_timeout, "1ms", "1h")
        )
        self._patience = seconds_of("patience", patience, "1ms", "1h")
        self._tls = _tls(cafile, certfile, keyfile)
        self._sending: Sending | None = None
        self._was_open = False
        self._calls: set[Call] = set()
        self._changing = PerLoop(asyncio.Lock)

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """From ``https://host/path?secret=whsec_...``; overrides are arguments too."""
        address, given = _split(url)
        return cls(address, **{**given, **overrides})

    @property
    def features(self) -> PublisherFeatures:
        return PublisherFeatures(calls=_CALLS, first_batch=_FIRST_BATCH)

    @property
    def description(self) -> str:
        return "http endpoints" if self._only is None else self._only.name.replace("://", " ")

    async def open(self) -> None:
        """Get ready. A server that is away does not raise: publishing reports it as an outage."""
        async with self._changing():
            if self._sending is not None:
                return
            self._sending = Sending(
                client=Client(self._guard, self._times, self._tls),
                states=States(self._concurrency),
                message_of=self._message_of,
                only=self._only,
                choose=self._endpoints,
                on_gone=self._on_gone,
                max_bytes=self._max_bytes,
                patience=self._patience,
            )
            self._was_open = True

    async def publish(self, batch: Batch) -> Sequence[Outcome]:
        """One outcome per event."""
        if not batch:
            return []
        if self._sending is None:
            outcome = UNTRIED if self._was_open else outage(f"{self.description} is not open; call open() first")
            return [outcome] * len(batch)
        call = Call(self._sending, batch)
        self._calls.add(call)
        try:
            return await call.run()
        finally:
            self._calls.discard(call)

    async def examine(self) -> Sequence[Finding]:
        """The only endpoint: whether it takes a connection, and whether messages are signed. Nothing is posted."""
        if self._sending is None:
            raise Outage(f"{self.description} is not open; call open() first")
        if self._only is None:
            return []
        address, host = self._only.address, self._only.address.host or ""
        tls = self._tls if address.scheme == "https" else None
        found = [ok("limits", f"a body has at most {self._max_bytes:,} bytes")]
        try:
            async with asyncio.timeout(self._times.connect):
                _, writer = await asyncio.open_connection(host, address.port, ssl=tls)
            writer.close()
            found.append(ok("address", f"{self._only.name} takes connections"))
        except (OSError, TimeoutError) as error:
            reason = "it did not answer" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
            found.append(failed("address", f"{self._only.name}: {reason}", "correct the URL, or start its server"))
        if not self._only.secrets:
            remedy = "give the publisher a secret"
            found.append(
                warning("signature", "messages are not signed: a receiver cannot tell ours from others", remedy)
            )
        return found

    async def close(self) -> None:
        """Disconnect. Requests on their way have a second to be answered."""
        async with self._changing():
            sending, self._sending = self._sending, None
            if sending is None:
                return
            sending.is_stopping = True
            tasks = [task for call in self._calls for task in call.tasks]
            if tasks:
                await asyncio.wait(tasks, timeout=_GRACE_SECONDS)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await sending.slow.close()
            await sending.client.close()


def _split(url: str) -> tuple[str, dict[str, Any]]:
    """The address, and the options of a publisher's URL as arguments."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("the HTTP URL cannot be read; in a password write [ as %5B and ] as %5D") from None
    arguments: dict[str, Any] = {}
    query = ""
    for pair in filter(None, parts.query.split("&")):
        name, _, text = pair.partition("=")
        if name not in _OPTIONS:
            raise ConfigError(
                f"unknown option {name!r} in the HTTP URL; write query={name}%3D and its value if it belongs to the "
                f"endpoint, or {hint(name, _OPTIONS)}"
            )
        value = unquote(text)  # a + is one: secrets have it
        if name == "secret":
            arguments["secret"] = [*arguments.get("secret", ()), value]
        elif name == "query":
            query = value
        else:
            arguments[name] = _converted(name, value)
    return parts._replace(query=query).geturl(), arguments


def _converted(name: str, value: str) -> Any:
    if name in _NUMBERS:
        if not value.isdecimal():
            raise ConfigError(f"{name}={value!r} in the HTTP URL is not a number; write for instance 16")
        return int(value)
    if name == "headers":
        build = load_object(value, "a header builder")
        if not callable(build):
            raise ConfigError(f"headers={value} in the HTTP URL is not a function from an event to its headers")
        return build
    return value


def _tls(cafile: str, certfile: str, keyfile: str) -> ssl.SSLContext:
    if keyfile and not certfile:
        raise ConfigError("keyfile= needs certfile=, the certificate that belongs to the key")
    try:
        context = ssl.create_default_context(cafile=cafile or None)
    except OSError as error:
        raise ConfigError(f"cafile={cafile!r} cannot be read ({error.strerror}); name a file in PEM format") from error
    if certfile:
        try:
            context.load_cert_chain(certfile, keyfile or None)
        except OSError as error:
            raise ConfigError(
                f"certfile={certfile!r} or keyfile={keyfile!r} cannot be read ({error.strerror}); "
                "name files in PEM format that belong together"
            ) from error
    return context
