"""The relay: its settings and its assembly."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import ConfigError
from pillarbox.event import Mode
from pillarbox.health import Health, HealthServer
from pillarbox.maintenance.check import Check
from pillarbox.maintenance.prune import Prune
from pillarbox.maintenance.reconcile import Reconcile
from pillarbox.maintenance.rescue import Rescue
from pillarbox.maintenance.sample import Sample
from pillarbox.maintenance.service import Service
from pillarbox.maintenance.watch import Watch
from pillarbox.observe import Observer, Observers, observed_publisher, observed_store
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.destination import publisher_of
from pillarbox.relay.plan import Rules
from pillarbox.relay.process import run_until_asked, worker_name
from pillarbox.relay.stream import OnDead, Stream
from pillarbox.relay.supervisor import Supervisor
from pillarbox.urls import store_of

if TYPE_CHECKING:
    from pillarbox.testing import Sent

log = logging.getLogger(__name__)


class Relay:
    """Publishes the events of an outbox. Use it as a service (``await relay.run()``) or inside your own event loop
    (``async with relay:``, or ``FastAPI(lifespan=relay.lifespan)``).

    store: a store, its URL, or what your application has: an asyncpg pool, an SQLAlchemy engine, a PyMongo client.
    streams: the streams that it serves, or the only one.
    name: the first part of its workers' name; default: the host's name.
    keep_published: how long published events are kept; 0 deletes an event as soon as it is published.
    keep_dead: how long dead letters are kept; those that a blocked or parked key waits for stay longer.
    keep_inbox: how long the inbox remembers a processed event, longer than a broker may deliver it again.
    keep_keys: how long idempotency keys are kept.
    prune_every, watch_every, rescue_every: between two runs; rescue: by default a third of the lease.
    grace: how long a stop takes at the most. What runs has 70 % of it; then it is ended.
    checks: find events that are missing. They need to see what was published: keep_published must be above 0.
    observers: learn what this relay does. Those that export metrics get gauges of the outbox every 15 seconds.
    listen: an address for ``/livez``, ``/readyz`` and ``/metrics``, for example ``127.0.0.1:9808``; default: none.
    logger: gets all log lines; default: one logger for each module.

    Durations are texts such as ``"24h"``, or numbers of seconds.
    """

    def __init__(
        self,
        store: Any,
        streams: Stream | Sequence[Stream],
        *,
        name: str | None = None,
        keep_published: Duration = "24h",
        keep_dead: Duration = "7d",
        keep_inbox: Duration = "8d",
        keep_keys: Duration = "24h",
        prune_every: Duration = "1h",
        watch_every: Duration = "1m",
        rescue_every: Duration | None = None,
        grace: Duration = "20s",
        checks: Sequence[Check] = (),
        observers: Sequence[Observer] = (),
        listen: str | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self.streams = (streams,) if isinstance(streams, Stream) else tuple(streams)
        _check_streams(self.streams)
        self.checks = tuple(checks)
        self._observers = Observers(observers, logger or log)
        self.store = observed_store(store_of(store), self._observers)
        self.name = worker_name(name)
        self._keep_published_seconds = seconds_of("keep_published", keep_published)
        self._keep_dead_seconds = seconds_of("keep_dead", keep_dead)
        self._keep_inbox_seconds = seconds_of("keep_inbox", keep_inbox)
        self._keep_keys_seconds = seconds_of("keep_keys", keep_keys)
        self._prune_seconds = seconds_of("prune_every", prune_every, "1ms")
        self._watch_seconds = seconds_of("watch_every", watch_every, "1ms")
        self._rescue_seconds = None if rescue_every is None else seconds_of("rescue_every", rescue_every, "1ms")
        self._grace_seconds = seconds_of("grace", grace)
        _check_checks(checks, self._keep_published_seconds)
        self._logger = logger
        self._log = logger or log
        self._jobs = [self._assign(stream) for stream in self.streams]
        self._supervisor: Supervisor | None = None
        #: Answers ``/livez``, ``/readyz`` and ``/metrics``; an ASGI application that can be mounted.
        self.health = Health(self, observers)
        self._server = None if listen is None else HealthServer(listen, self.health, logger=logger)

    def _assign(self, stream: Stream) -> Assignment:
        publisher = observed_publisher(publisher_of(stream), self._observers)
        self._observers.serves(stream.name, publisher.description)
        keep, logger = self._keep_published_seconds > 0, self._logger
        rules = Rules(stream.retry_policy, stream.max_attempts, OnDead(stream.on_dead), keep, logger)
        return Assignment(self.store, stream, publisher, rules, self.name, self._grace_seconds, self._observers, logger)

    def _services(self) -> list[Service]:
        prune = Prune(
            self.store,
            keep_published=self._keep_published_seconds,
            keep_dead=self._keep_dead_seconds,
            keep_inbox=self._keep_inbox_seconds,
            keep_keys=self._keep_keys_seconds,
            every=self._prune_seconds,
            logger=self._logger,
        )
        own = {job.stream.name for job in self._jobs}
        watch = Watch(self.store, own=own, every=self._watch_seconds, logger=self._logger)
        samples = [Sample(self.store, self._observers, logger=self._logger)] if self._observers.wants("sampled") else []
        rescues = [self._rescue(job.stream) for job in self._jobs if job.stream.mode is Mode.QUEUE]
        reconciles = [
            # A check that hangs is ended before the stop ends.
            Reconcile(self.store, check, grace=self._grace_seconds / 2, logger=self._logger)
            for check in self.checks
        ]
        return [prune, watch, *samples, *rescues, *reconciles]

    def _rescue(self, stream: Stream) -> Rescue:
        every = max(0.05, stream.lease_seconds / 3) if self._rescue_seconds is None else self._rescue_seconds
        return Rescue(
            self.store,
            stream.name,
            stuck=stream.stuck_seconds,
            every=every,
            logger=self._logger,
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """For an ASGI application: the relay runs as long as the application does.

        The application starts at once. The relay connects in the background."""
        async with self:
            yield

    async def start(self) -> None:
        """Begin to work, in the background. A database or destination that is not there yet is waited for."""
        if self._is_running:
            raise ConfigError("this relay runs already; make another object for a second one")
        if self._server is not None:
            await self._server.start()
        # A new one for each start, because this may be another event loop.
        self._supervisor = Supervisor(self.store, self._jobs, self._services(), self._grace_seconds, self._logger)
        self._supervisor.start()

    async def ready(self) -> None:
        """Wait until every stream is served. Raises an error that no waiting mends: a setting or a password that is
        wrong, missing tables. The relay itself goes on trying."""
        await self._running("ready").readiness.wait()

    async def stop(self) -> None:
        """Finish or give back all work, and disconnect, within ``grace``. Safe to call twice."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        await supervisor.stop()
        if self._server is not None:
            await self._server.close()
        if self._supervisor is supervisor:
            self._supervisor = None
            self._log.info("relay %s stopped", self.name, extra={"action": "stopped", "worker": self.name})

    @property
    def port(self) -> int | None:
        """The port that ``listen`` got; None: it listens on none."""
        return None if self._server is None else self._server.port

    def troubles(self) -> Sequence[str]:
        """Why a restart of this process would help, a sentence each; none: it is live."""
        return () if self._supervisor is None else self._supervisor.troubles()

    def missing(self) -> Sequence[str]:
        """The parts that do not serve; none: it is ready."""
        return ["start"] if self._supervisor is None else self._supervisor.missing()

    def circuits(self) -> Mapping[str, str]:
        """By stream: ``closed``, or ``open`` and ``half_open`` while its destination is away."""
        return {} if self._supervisor is None else self._supervisor.circuits()

    @property
    def _is_running(self) -> bool:
        return self._supervisor is not None and self._supervisor.running

    def _running(self, asked: str) -> Supervisor:
        if self._supervisor is None or not self._supervisor.running:
            raise ConfigError(f"{asked}() needs a relay that runs; call it inside `async with relay:` or after start()")
        return self._supervisor

    async def drain(self) -> None:
        """Wait until no event is ready to be published. The events of a worker that died come when its lease runs out;
        those of a live one are left to it. Events that wait for a retry or an instant do not count.

        Raises NotDrained if a stream is paused and events wait."""
        await self._running("drain").drain()

    @asynccontextmanager
    async def test(self) -> AsyncIterator["Sent"]:
        """For tests: ``async with relay.test() as sent:`` publishes into a list. The block ends when no event is ready.

        No broker is used. Handlers run, and the list has the events that they handled; ``sent.failed`` has the attempts
        that failed. The tables are made if there are none. Events that wait in the outbox count as published then.
        Therefore it refuses an outbox that another relay serves: give tests an outbox of their own.
        """
        if self._is_running:
            raise ConfigError("this relay runs already; use relay.test() in place of start() or `async with relay:`")
        sent: Sent = import_module("pillarbox.testing").Sent()
        await self.store.migrate()
        await self.store.open()
        try:
            others = await self.store.workers()
            if any(worker.live for workers in others.values() for worker in workers):
                raise ConfigError(
                    f"another relay serves {self.store.description}, and relay.test() would take its events; give the "
                    "test an outbox of its own, by another database or prefix"
                )
            jobs = [sent.instead_of(job) for job in self._jobs]
            self._supervisor = Supervisor(self.store, jobs, (), self._grace_seconds, self._logger)
            self._supervisor.start()
            try:
                await self.ready()
                yield sent
                await self.drain()
            finally:
                await self.stop()
        finally:
            await self.store.close()

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT, as the only task of this process."""
        await run_until_asked(self.start, self.stop, lambda: self._running("run").readiness)


def _check_streams(streams: Sequence[Any]) -> None:
    if not streams:
        raise ConfigError('a relay needs at least one stream; for example streams=[Stream("default", to="stdout:")]')
    wrong = next((stream for stream in streams if not isinstance(stream, Stream)), None)
    if wrong is not None:
        kind = type(wrong).__name__
        raise ConfigError(
            f'a relay was given a {kind} as a stream; write Stream("default", to=...) around a destination'
        )
    names = [stream.name for stream in streams]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"stream '{twice}' is named twice; give each stream of a relay a name of its own")


def _check_checks(checks: Sequence[Any], keep_published_seconds: float) -> None:
    names = set()
    for check in checks:
        if not isinstance(check, Check):
            kind = type(check).__name__
            raise ConfigError(f'checks holds a {kind}; for example checks=[Check("pages", pages_without_snapshot)]')
        if check.name in names:
            raise ConfigError(f"check '{check.name}' is named twice; give each check of a relay a name of its own")
        names.add(check.name)
    if checks and keep_published_seconds <= 0:
        raise ConfigError(
            "checks need to see what was published, and keep_published is 0; "
            'keep it for longer than it takes until an event has its effect, for example "24h"'
        )
