"""Sends one event in a request, and judges the answer."""

import asyncio
import os
import ssl
import time
from dataclasses import dataclass
from io import BytesIO
from typing import Final

import aiohttp

from pillarbox.envelopes import HttpMessage
from pillarbox.envelopes.headers import id_text
from pillarbox.event import Event
from pillarbox.publishers.http.answers import Fault, Verdict, verdict_of
from pillarbox.publishers.http.endpoint import Endpoint
from pillarbox.publishers.http.guard import Forbidden, Guard
from pillarbox.publishers.http.signing import signatures
from pillarbox.publishers.http.state import State
from pillarbox.version import __version__

_ANSWER_BYTES: Final = 65_536
_ANSWER_SECONDS: Final = 1.0
# Less than the five seconds after which common servers close a quiet connection: a request on its way would be lost.
_KEEPALIVE_SECONDS: Final = 4.0
_LARGE_BYTES: Final = 1 << 20  # aiohttp sends more than this in pieces


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a request may take, and its connection."""

    request: float
    connect: float


class Client:
    """The connections of one publisher. Customers' endpoints have their own: a connection that was made for a trusted
    endpoint is used for no other."""

    def __init__(self, guard: Guard, times: Times, tls: ssl.SSLContext) -> None:
        self._guard = guard
        self._times = times
        self._trusted = self._session(tls, times)
        self._guarded = self._session(tls, times, guard)

    @staticmethod
    def _session(tls: ssl.SSLContext, times: Times, guard: Guard | None = None) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            ssl=tls,
            limit=0,  # the publisher counts
            keepalive_timeout=_KEEPALIVE_SECONDS,
            socket_factory=None if guard is None else guard.socket,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=times.request, sock_connect=times.connect),
            headers={"User-Agent": f"pillarbox/{__version__}", "Accept-Encoding": "identity"},
        )

    async def post(self, endpoint: Endpoint, state: State, event: Event, message: HttpMessage) -> Verdict:
        """Send the message of this event."""
        if not endpoint.trusted and (problem := self._guard.problem(endpoint.address)):
            return _forbidden(endpoint, problem)
        body, headers = message
        id_, timestamp = id_text(event.id), int(time.time())
        headers["webhook-id"], headers["webhook-timestamp"] = id_, str(timestamp)
        if endpoint.secrets:
            headers["webhook-signature"] = signatures(endpoint.keys, id_, timestamp, body)
        session = self._trusted if endpoint.trusted else self._guarded
        data = BytesIO(body) if len(body) > _LARGE_BYTES else body
        begun = time.monotonic()
        try:
            response = await session.post(endpoint.address, data=data, headers=headers, allow_redirects=False)
        except Exception as error:
            return self._failure(endpoint, error, state.was_lively(begun, self._times.request))
        state.answered(self._times.request)
        # The status is the answer, whatever the rest of it is.
        await _read(response)
        return verdict_of(state.name, response.status, response.headers)

    async def close(self) -> None:
        await self._trusted.close()
        await self._guarded.close()

    def _failure(self, endpoint: Endpoint, error: Exception, is_lively: bool) -> Verdict:
        name = endpoint.name
        if _cause(error, Forbidden):
            return _forbidden(endpoint, "it leads to a private or reserved address")
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return Verdict(Fault.ENDPOINT, f"{name} did not take a connection within {self._times.connect:g} s")
        if (refused := _cause(error, ssl.SSLError)) is not None:
            return Verdict(
                Fault.ENDPOINT,
                f"{name}: TLS was refused ({_tls_reason(refused)}); correct the certificates of both sides",
            )
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return Verdict(Fault.ENDPOINT, f"{name}: its host has no address")
        if isinstance(error, aiohttp.ClientConnectorError):
            return Verdict(Fault.ENDPOINT, f"{name} cannot be reached: {_reason(error.os_error)}")
        if isinstance(error, aiohttp.InvalidURL):
            fault = Fault.ENDPOINT if endpoint.trusted else Fault.FORBIDDEN
            return Verdict(fault, f"{name}: its URL cannot be used; correct its host")
        if isinstance(error, ValueError):
            return Verdict(Fault.EVENT, f"{name}: HTTP has no form for a header of this event")
        # The request was sent.
        if isinstance(error, TimeoutError):
            # It may be the event's fault only if others had answers all the time.
            fault = Fault.EITHER if is_lively else Fault.AWAY
            return Verdict(fault, f"{name} did not answer within {self._times.request:g} s")
        if isinstance(error, aiohttp.ClientResponseError):
            return Verdict(Fault.AWAY, f"{name} did not answer in HTTP")
        if isinstance(error, aiohttp.ClientError | OSError):
            return Verdict(Fault.AWAY, f"{name} closed the connection without an answer")
        return Verdict(Fault.AWAY, f"{name}: the request failed with {type(error).__name__}")


async def _read(response: aiohttp.ClientResponse) -> None:
    """Read the rest of the answer, so that its connection can be used again; close it if that takes too long."""
    left = _ANSWER_BYTES
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            while left > 0 and not response.content.at_eof():
                left -= len(await response.content.readany())
    except (aiohttp.ClientError, OSError, TimeoutError):
        return
    finally:
        response.close()


def _forbidden(endpoint: Endpoint, problem: str) -> Verdict:
    return Verdict(
        Fault.FORBIDDEN, f"{endpoint.name} is no address for a customer's endpoint: {problem}; correct its URL"
    )


def _cause(error: BaseException | None, kind: type[OSError]) -> OSError | None:
    """The error of this kind from which another one was made."""
    while error is not None:
        for each in (getattr(error, "certificate_error", None), getattr(error, "os_error", None), error):
            if isinstance(each, kind):
                return each
        error = error.__cause__
    return None


def _tls_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message or "its certificate is not valid"
    return getattr(error, "reason", None) or "the handshake failed"


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or type(error).__name__
