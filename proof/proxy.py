"""A TCP proxy that breaks the network between one relay and one server.

It has one fault at a time. A call that changes the fault returns when the change is in force. Bytes that the proxy had
begun to write count as passed.
"""

import asyncio
import random
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Self, TypeVar

Direction = Literal["to_server", "to_client"]
T = TypeVar("T")

_LOCAL: Final = "127.0.0.1"
_CHUNK: Final = 64 * 1024  # all that a connection holds in each direction
_BACKLOG: Final = 1024
_PIECES_PER_SECOND: Final = 10  # of a throttled stream
_NO_DESCRIPTORS_SECONDS: Final = 0.1
_NOW: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST
_BOTH: Final[tuple[Direction, Direction]] = ("to_server", "to_client")


@dataclass(slots=True)
class Counts:
    """Counts since the start. Lost bytes were swallowed; resets are connections that the proxy reset."""

    connections: int = 0
    resets: int = 0
    passed: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(_BOTH, 0))
    lost: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(_BOTH, 0))


@dataclass(slots=True, eq=False)
class _Mode:
    name: str
    drops: tuple[Direction, ...] = ()
    after: bytes = b""  # drops begin on a connection once its client has sent this
    refuses: bool = False
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    bytes_per_second: float = 0.0
    cut: Direction | None = None
    cut_bytes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    # The instant at which a throttled line will have sent everything that waits.
    free_at: dict[Direction, float] = field(default_factory=lambda: dict.fromkeys(_BOTH, 0.0))


@dataclass(slots=True, eq=False)
class _Flow:
    """One direction of a connection."""

    direction: Direction
    source: socket.socket
    sink: socket.socket
    holed: bool = False  # bytes or the end of its source did not reach its sink
    deaf: bool = False  # the sink is closed, and the source must not learn it
    mode: _Mode | None = None  # that the next three belong to
    sent_in_mode: int = 0
    tail: bytes = b""
    triggered: bool = False

    def enter(self, mode: _Mode) -> None:
        if self.mode is not mode:
            self.mode, self.sent_in_mode, self.tail, self.triggered = mode, 0, b"", False

    def vanishes(self, mode: _Mode) -> bool:
        return self.direction in mode.drops and (not mode.after or (self.mode is mode and self.triggered))


@dataclass(slots=True, eq=False)
class _Connection:
    sockets: list[socket.socket]
    flows: list[_Flow] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    nowhere: bool = False  # made while nothing could reach the server

    def has_hole_outside(self, mode: _Mode) -> bool:
        if self.nowhere:
            return "to_server" not in mode.drops
        return any(flow.holed and not flow.vanishes(mode) for flow in self.flows)


class _Cut(ConnectionError):
    """A connection has passed the bytes that it was allowed."""


class Proxy:
    """Listens on 127.0.0.1 and passes bytes on to one server, in the event loop that started it.

    port: where to listen; 0 takes a free one. Known after ``start``.
    seed: of the jitter.
    """

    def __init__(self, target_host: str, target_port: int, *, port: int = 0, seed: int = 0) -> None:
        self.counts = Counts()
        self._target = (target_host, target_port)
        self._port = port
        self._random = random.Random(seed)
        self._mode = _Mode("pass")
        self._connections: set[_Connection] = set()
        self._place: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._changing = asyncio.Lock()

    @property
    def port(self) -> int:
        if not self._port:
            raise RuntimeError("the proxy has no port before start()")
        return self._port

    @property
    def mode(self) -> str:
        return self._mode.name

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def start(self) -> Self:
        # Bound and never listening: it keeps the port while connections are refused. Otherwise another socket could
        # take the port, or a client that retries could connect to itself.
        self._place = _bound(self._port)
        self._port = self._place.getsockname()[1]
        self._listen()
        return self

    async def close(self) -> None:
        """Reset all connections. Safe to call twice."""
        async with self._changing:
            self._deafen()
            if self._place is not None:
                self._place.close()
                self._place = None
            self._mode.ended.set()
            await self._reset(list(self._connections))

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def heal(self) -> None:
        """Pass everything again. Connections that lost bytes are reset: a stream with a gap must not go on."""
        await self._change(_Mode("pass"))

    async def delay(self, seconds: float, jitter: float = 0.0) -> None:
        """Delay all bytes by ``seconds`` and up to ``jitter`` more, in order."""
        await self._change(_Mode("delay", delay_seconds=seconds, jitter_seconds=jitter))

    async def throttle(self, bytes_per_second: float) -> None:
        """Limit each direction, for all connections together."""
        if bytes_per_second <= 0:
            raise ValueError(f"throttle({bytes_per_second}) would never end; use drop to pass nothing")
        await self._change(_Mode("throttle", bytes_per_second=bytes_per_second))

    async def refuse(self, *, reset: bool = False) -> None:
        """Refuse new connections. Existing ones go on, or are reset."""
        await self._change(_Mode("refuse", refuses=True), reset=reset)

    async def drop(self, direction: Direction | Literal["both"] = "both") -> None:
        """Half-open: bytes, ends and resets of one side do not reach the other side.

        New connections are accepted. If nothing reaches the server, it does not see them.
        """
        await self._change(_Mode(f"drop_{direction}", drops=_BOTH if direction == "both" else (direction,)))

    async def swallow_replies(self, *, after: bytes = b"") -> None:
        """Pass requests, and swallow the server's answers from now on.

        after: on each connection only from the answer to the request that contains it, such as ``b"COMMIT"``. Without
        it a transaction of several requests never gets past its first answer.
        """
        await self._change(_Mode("swallow_replies", drops=("to_client",), after=after))

    async def cut_after(self, count: int, direction: Direction) -> None:
        """Reset each connection, also new ones, after so many more bytes; 0: before the first byte.

        A slow reader gets fewer bytes: a reset overtakes bytes that are on their way.
        """
        await self._change(_Mode("cut_after", cut=direction, cut_bytes=count))

    async def reset(self) -> None:
        """Reset both ends of every connection once. The fault stays."""
        async with self._changing:
            await self._reset(list(self._connections))

    async def _change(self, mode: _Mode, *, reset: bool = False) -> None:
        async with self._changing:
            if self._place is None:
                raise RuntimeError("the proxy is not started, or closed")
            self._mode.ended.set()
            self._mode = mode
            if mode.refuses:
                self._deafen()
            elif self._listener is None:
                self._listen()
            await self._reset([each for each in self._connections if reset or each.has_hole_outside(mode)])

    async def _reset(self, connections: Iterable[_Connection]) -> None:
        tasks = [each.task for each in connections if each.task is not None]
        self.counts.resets += len(tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _listen(self) -> None:
        self._listener = _bound(self._port)
        self._listener.listen(_BACKLOG)
        self._watch(self._listener)

    def _watch(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _deafen(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        # Not loop.sock_accept: it loses a connection if it is cancelled at the wrong moment.
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # Out of descriptors: the connection stays in the queue, and the loop would spin.
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_NO_DESCRIPTORS_SECONDS, self._watch, listener)
            return
        _prepare(client)
        self.counts.connections += 1
        connection = _Connection([client])
        self._connections.add(connection)
        connection.task = asyncio.get_running_loop().create_task(self._serve(connection))
        # Not in the task itself: a task that is cancelled before its first step runs no code.
        connection.task.add_done_callback(lambda task: self._end(connection, task))

    def _end(self, connection: _Connection, task: asyncio.Task[None]) -> None:
        self._connections.discard(connection)
        broken = task.cancelled() or task.exception() is not None
        for each in connection.sockets:
            if broken:
                with suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOW)
            each.close()
        if task.cancelled() or (error := task.exception()) is None:
            return
        errors = error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("", [error])
        self.counts.resets += errors.subgroup(_Cut) is not None
        _, unexpected = errors.split(OSError)
        if unexpected is not None:
            task.get_loop().call_exception_handler({"message": "a bug in the proxy", "exception": unexpected})

    async def _serve(self, connection: _Connection) -> None:
        (client,) = connection.sockets
        if "to_server" in self._mode.drops:
            connection.nowhere = True
            with suppress(OSError):
                while data := await asyncio.get_running_loop().sock_recv(client, _CHUNK):
                    self.counts.lost["to_server"] += len(data)
            return
        server = socket.socket()
        connection.sockets.append(server)
        _prepare(server)
        await asyncio.get_running_loop().sock_connect(server, self._target)
        there, back = _Flow("to_server", client, server), _Flow("to_client", server, client)
        connection.flows += [there, back]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(there, back))
            group.create_task(self._pump(back, there))

    async def _pump(self, flow: _Flow, opposite: _Flow) -> None:
        loop = asyncio.get_running_loop()
        while True:
            error = None
            try:
                data = await loop.sock_recv(flow.source, _CHUNK)
            except OSError as caught:
                data, error = b"", caught
            if data:
                await self._forward(flow, opposite, data)
            elif flow.vanishes(self._mode) or flow.deaf:
                flow.holed |= flow.vanishes(self._mode)
                await loop.create_future()  # until this connection is reset
            elif error:
                raise error
            else:
                flow.sink.shutdown(socket.SHUT_WR)
                return

    async def _forward(self, flow: _Flow, opposite: _Flow, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            mode = self._mode
            # After a gap nothing passes, also in the moment before the connection is reset.
            if flow.deaf or flow.holed or flow.vanishes(mode):
                flow.holed |= flow.vanishes(mode)
                self.counts.lost[flow.direction] += len(rest)
                return
            piece = rest[: self._allowance(flow, mode, len(rest))]
            if not await self._wait(flow, mode, len(piece)):
                continue
            if mode.after and flow.direction == "to_server":
                _look_for(mode, flow, opposite, piece)
            try:
                await asyncio.get_running_loop().sock_sendall(flow.sink, piece)
            except OSError:
                # The other direction learns that the sink is closed.
                if not opposite.vanishes(self._mode):
                    raise
                flow.deaf = opposite.holed = True
                continue
            self.counts.passed[flow.direction] += len(piece)
            rest = rest[len(piece) :]
            if mode.cut == flow.direction and mode is self._mode:
                flow.sent_in_mode += len(piece)
                if flow.sent_in_mode >= mode.cut_bytes:
                    raise _Cut

    def _allowance(self, flow: _Flow, mode: _Mode, size: int) -> int:
        if mode.cut == flow.direction:
            flow.enter(mode)
            size = min(size, mode.cut_bytes - flow.sent_in_mode)
            if size <= 0:
                raise _Cut
        if mode.bytes_per_second:
            size = min(size, max(1, int(mode.bytes_per_second / _PIECES_PER_SECOND)))
        return size

    async def _wait(self, flow: _Flow, mode: _Mode, size: int) -> bool:
        """False: the fault changed meanwhile, and the new one decides."""
        seconds = 0.0
        if mode.bytes_per_second:
            now = asyncio.get_running_loop().time()
            free_at = max(now, mode.free_at[flow.direction]) + size / mode.bytes_per_second
            mode.free_at[flow.direction] = free_at
            seconds = free_at - now
        elif mode.delay_seconds or mode.jitter_seconds:
            seconds = mode.delay_seconds + self._random.uniform(0, mode.jitter_seconds)
        if seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await mode.ended.wait()
        return mode is self._mode


def _look_for(mode: _Mode, flow: _Flow, opposite: _Flow, piece: memoryview) -> None:
    flow.enter(mode)
    opposite.enter(mode)
    seen = flow.tail + piece
    # Before the bytes are sent, so that no answer can be faster.
    opposite.triggered |= mode.after in seen
    flow.tail = seen[max(0, len(seen) - len(mode.after) + 1) :]


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    # Two sockets may bind the port as long as only one listens.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((_LOCAL, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    # Small replies must not wait for an acknowledgement: that would be an unwanted delay.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
