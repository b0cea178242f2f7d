"""The relay: a worker for each stream and the maintenance, each restarted by itself when it fails."""

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Self

from pillarbox.errors import ConfigError, DestinationDown, PillarboxError, StoreDown
from pillarbox.event import Mode
from pillarbox.maintenance.check import Check
from pillarbox.maintenance.prune import DAY_SECONDS, Prune
from pillarbox.maintenance.reconcile import Reconcile
from pillarbox.maintenance.rescue import Rescue
from pillarbox.maintenance.service import Service
from pillarbox.maintenance.watch import Watch
from pillarbox.publisher import Publisher
from pillarbox.relay.ordered import OrderedWorker
from pillarbox.relay.plan import Rules
from pillarbox.relay.queue import QueueWorker
from pillarbox.relay.stream import OnDead, Stream
from pillarbox.relay.worker import StreamWorker, close
from pillarbox.store import Store
from pillarbox.urls import publisher_from_url, store_from_url

log = logging.getLogger(__name__)

_RESTART_SECONDS = (1.0, 30.0)
_CONNECT_SECONDS = 5.0


class Relay:
    """Publishes the events of an outbox. Use it as a service (``await relay.run()``) or inside your own event loop
    (``async with relay:``, or ``FastAPI(lifespan=relay.lifespan)``).

    store: a store, or its URL. keep_published_seconds: 0 deletes an event as soon as it is published.
    grace_seconds: how long a stop waits for what is under way before it takes it back.
    checks: what the reconciler looks for; it has to see what was published, so keep_published_seconds is above 0 then.
    """

    def __init__(
        self,
        store: Store | str,
        streams: Sequence[Stream],
        *,
        name: str | None = None,
        keep_published_seconds: float = DAY_SECONDS,
        keep_dead_seconds: float = 7 * DAY_SECONDS,
        prune_seconds: float = 3600.0,
        watch_seconds: float = 60.0,
        grace_seconds: float = 20.0,
        checks: Sequence[Check] = (),
    ) -> None:
        if not streams:
            raise ConfigError(
                'a relay needs at least one stream; for example streams=[Stream("default", to="stdout:")]'
            )
        names = [stream.name for stream in streams]
        twice = next((stream for stream in names if names.count(stream) > 1), None)
        if twice is not None:
            raise ConfigError(f"stream '{twice}' is named twice; give each stream of a relay a name of its own")
        keep = keep_published_seconds > 0
        self.checks = _checked(checks, keep)
        self.store = store_from_url(store) if isinstance(store, str) else store
        # Unique to this start of this process: a restarted worker must not be taken for the one that died.
        self.name = f"{name or socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._grace = grace_seconds
        self._streams = [(stream, publisher_of(stream), _rules(stream, keep)) for stream in streams]
        self._workers: dict[str, StreamWorker] = {}
        self._serves = {name: asyncio.Event() for name in names}
        self._wrong: dict[str, ConfigError] = {}  # a drain would wait for these for ever
        self._services: list[Service] = []
        self._keep = (keep_published_seconds, keep_dead_seconds)
        self._intervals = (prune_seconds, watch_seconds)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    def _maintenance(self) -> list[Service]:
        keep_published, keep_dead = self._keep
        prune_seconds, watch_seconds = self._intervals
        prune = Prune(
            self.store,
            keep_published_seconds=keep_published,
            keep_dead_seconds=keep_dead,
            interval_seconds=prune_seconds,
        )
        rescues = [
            Rescue(
                self.store,
                stream.name,
                stuck_seconds=stream.stuck_seconds,
                max_attempts=stream.max_attempts,
                interval_seconds=max(0.05, stream.lease_seconds / 3),
            )
            for stream, _, _ in self._streams
            if stream.mode is Mode.QUEUE
        ]
        reconciles = [Reconcile(self.store, check, grace_seconds=self._grace) for check in self.checks]
        return [prune, Watch(self.store, interval_seconds=watch_seconds), *rescues, *reconciles]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """For an ASGI application: the relay runs as long as it does."""
        async with self:
            yield

    async def start(self) -> None:
        """Open the store (waiting for a database that is not there yet) and begin to work."""
        if self._tasks:
            raise ConfigError("this relay runs already; make another object for a second one")
        self._stopping = asyncio.Event()
        await self._open_store()
        self._services = self._maintenance()
        for stream, publisher, rules in self._streams:
            serve = self._serving(stream, publisher, rules)
            self._tasks.append(asyncio.create_task(self._again(stream.name, serve), name=f"pillarbox-{stream.name}"))
        for service in self._services:
            self._tasks.append(asyncio.create_task(service.run(), name=f"pillarbox-{service.name}"))
        log.info(
            "relay %s serves %s of %s",
            self.name,
            ", ".join(f"'{stream.name}' to {publisher.description}" for stream, publisher, _ in self._streams),
            self.store.description,
            extra={"action": "started", "worker": self.name},
        )

    async def stop(self) -> None:
        """Finish or give back what is held, then let go of everything. Safe to call twice."""
        self._stopping.set()
        for serves in self._serves.values():
            serves.set()  # a drain waits for no successor any more
        for worker in self._workers.values():
            worker.stop()
        for service in self._services:
            service.stop()
        tasks, self._tasks = self._tasks, []
        if tasks:
            await asyncio.wait(tasks)
        await self.store.close()
        log.info("relay %s stopped", self.name, extra={"action": "stopped", "worker": self.name})

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT, as the one thing that this process does."""
        with seldom_collecting():
            await self._run()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked.set)
        try:
            starting = asyncio.create_task(self.start())
            waiting = asyncio.create_task(asked.wait())
            await asyncio.wait([starting, waiting], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
                await waiting
            waiting.cancel()
        finally:
            # A second Ctrl-C ends it at once; a second SIGTERM asks for what is under way already.
            loop.remove_signal_handler(signal.SIGINT)
            await self.stop()
            loop.remove_signal_handler(signal.SIGTERM)

    async def drain(self) -> None:
        """Wait until no event is ready to be published; those that wait for a retry or an instant do not count."""
        for stream, _, _ in self._streams:
            while not await self._drained(stream.name):
                self._serves[stream.name].clear()  # until the successor of the worker that failed serves

    async def _drained(self, stream: str) -> bool:
        """False: its worker failed before it could tell."""
        await self._serves[stream].wait()
        if stream in self._wrong:
            raise self._wrong[stream]
        worker = self._workers.get(stream)
        return self._stopping.is_set() or (worker is not None and await worker.drained())

    def _woken(self, stream: str) -> None:
        if stream in self._workers:
            self._workers[stream].wake()

    async def _open_store(self) -> None:
        told = False
        while True:
            try:
                return await self.store.open(self._woken)
            except StoreDown as error:
                if not told:
                    log.warning("%s; trying again every few seconds", error, extra={"action": "store_down"})
                told = True
            except BaseException:
                await self.store.close()
                raise
            await asyncio.sleep(_CONNECT_SECONDS)

    def _serving(self, stream: Stream, publisher: Publisher, rules: Rules) -> Callable[[], Coroutine[Any, Any, None]]:
        async def serve() -> None:
            try:
                if not await self._open_publisher(stream, publisher):
                    return
                kind = QueueWorker if stream.mode is Mode.QUEUE else OrderedWorker
                worker = kind(self.store, stream, publisher, rules, self.name, self._grace)
                self._workers[stream.name] = worker
                self._wrong.pop(stream.name, None)
                self._serves[stream.name].set()
                if self._stopping.is_set():
                    return
                await worker.run()
            finally:
                self._serves[stream.name].clear()
                self._workers.pop(stream.name, None)
                await close(publisher, StreamWorker.last_seconds)

        return serve

    async def _open_publisher(self, stream: Stream, publisher: Publisher) -> bool:
        """Wait for a destination that is not there yet; False: told to stop meanwhile."""
        told = False
        while not self._stopping.is_set():
            try:
                await publisher.open()
                return True
            except DestinationDown as error:
                if not told:
                    log.warning(
                        "stream '%s': %s; trying again every few seconds",
                        stream.name,
                        error,
                        extra={"action": "destination_down", "stream": stream.name},
                    )
                told = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _CONNECT_SECONDS)
        return False

    async def _again(self, name: str, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Restart what fails, each time after a longer wait: one stream's trouble is not another's."""
        wait, longest = _RESTART_SECONDS
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            begun = loop.time()
            try:
                await serve()
                continue
            except Exception as error:
                if loop.time() - begun > longest:
                    wait = _RESTART_SECONDS[0]
                # Our own errors say what to do; a traceback helps only with those that nobody foresaw.
                log.error(
                    "stream '%s' failed (%s: %s); starting it again in %.0f s",
                    name,
                    type(error).__name__,
                    error,
                    wait,
                    exc_info=None if isinstance(error, PillarboxError) else error,
                    extra={"action": "restarting", "stream": name},
                )
                if isinstance(error, ConfigError):
                    self._wrong[name] = error
                    self._serves[name].set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)
            wait = min(longest, wait * 2)


def publisher_of(stream: Stream) -> Publisher:
    """The destination of a stream, as its settings want it."""
    strict = stream.on_dead is not OnDead.SKIP
    publisher = stream.to
    if isinstance(publisher, str):
        options = {"strict_keys": True} if strict and publisher.startswith("kafka:") else {}
        publisher = publisher_from_url(publisher, **options)
    limited = getattr(publisher, "limited_to", None)
    if limited is not None:
        slots = stream.concurrency if stream.mode is Mode.QUEUE else max(stream.concurrency, stream.slots or 0)
        publisher = limited(slots)
    if strict and not publisher.features.strict_keys:
        raise ConfigError(
            f"stream '{stream.name}': on_dead={stream.on_dead} needs a publisher that sends nothing of a key after "
            f"a rejected event; give {publisher.description.split()[0]} strict_keys=True"
        )
    return publisher


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Events come and go by the thousand and form no cycles: looking for some after every 700 objects is wasted."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _rules(stream: Stream, keep_published: bool) -> Rules:
    return Rules(stream.retry, stream.max_attempts, OnDead(stream.on_dead), keep_published)


def _checked(checks: Sequence[Any], keep_published: bool) -> Sequence[Check]:
    names = set()
    for check in checks:
        if not isinstance(check, Check):
            kind = type(check).__name__
            raise ConfigError(f'checks holds a {kind}; for example checks=[Check("pages", pages_without_snapshot)]')
        if check.name in names:
            raise ConfigError(f"check '{check.name}' is named twice; give each check of a relay a name of its own")
        names.add(check.name)
    if checks and not keep_published:
        raise ConfigError(
            "checks need to see what was published, and keep_published_seconds is 0; "
            "keep it for longer than it takes until an event has its effect, for example 3600"
        )
    return tuple(checks)
