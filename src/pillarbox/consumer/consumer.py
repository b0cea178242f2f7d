"""The consumer: its settings and its assembly."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from typing import Any, Final, Literal, Self

from pillarbox.consumer.decoder import Decoder, Ids, checked, make_decoder
from pillarbox.consumer.job import Job
from pillarbox.consumer.letters import Letters, SentLetters, StoreLetters
from pillarbox.consumer.runner import Runner
from pillarbox.consumer.services import Replays, Reports
from pillarbox.consumer.supervisor import State, Supervisor
from pillarbox.durations import Duration, seconds_of
from pillarbox.errors import ConfigError, InvalidEvent
from pillarbox.health import Health, HealthServer
from pillarbox.hints import hint
from pillarbox.limits import check_name
from pillarbox.maintenance.prune import Prune
from pillarbox.maintenance.service import Service
from pillarbox.observe import Observer, Observers, observed_publisher
from pillarbox.publisher import Needs, Publisher
from pillarbox.publishers.handlers import Handlers
from pillarbox.relay.destination import prepared_publisher
from pillarbox.relay.plan import Rules
from pillarbox.relay.process import run_until_asked, worker_name
from pillarbox.relay.retry import Exponential, Retry, retry_of
from pillarbox.relay.stream import OnDead
from pillarbox.relay.subject import Subject
from pillarbox.source import Source
from pillarbox.urls import publisher_from_url, source_from_url, store_of

log = logging.getLogger(__name__)

# About 1, 3, 9 and 27 s at the longest: five attempts within a minute.
RETRY: Final = Exponential("1s", factor=3.0, limit="30s")


class Consumer:
    """Reads messages from a broker and gives their events to handlers, in order per key. Use it as a service
    (``await consumer.run()``) or inside your own event loop (``async with consumer:``, or
    ``FastAPI(lifespan=consumer.lifespan)``).

    name: of the consumer, for the broker, for its dead letters and for the inbox: give ``Inbox`` the same one.
    source: a source, or its URL such as ``kafka://localhost:9092?topic=orders``.
    to: handlers, or any other publisher, or its URL.
    store: for dead letters and for `pillarbox status`: a store, its URL, or what your application has. It is the
    database of the handlers' inbox. None: events can only be sent to ``dead_to``, or block their key.
    dead_to: without a store: a publisher, or its URL, that gets dead events.
    on_dead: ``skip`` keeps a dead event as a dead letter, and its key goes on; ``block`` tries it again every 5 minutes
    while its key waits.
    retry: a policy or its text, as for a stream; default: up to 1, 3, 9 and 27 s. max_attempts: until an event is dead.
    decoder: a function from a message to its event. ids: what a message without an id gets: ``required`` refuses it,
    ``place`` makes an id from its topic, partition and offset.
    window, window_bytes: the most messages and bytes of one lane that are not settled; then the lane pauses.
    concurrency: handlers at once. grace: how long a stop takes at the most.
    keep_dead, keep_inbox, keep_keys, prune_every: as in a relay, with a store.
    replay_every: how often it asks the store for dead letters that an operator has replayed.
    observers: learn what this consumer does.
    listen: an address for ``/livez``, ``/readyz`` and ``/metrics``, for example ``127.0.0.1:9808``; default: none.
    logger: gets all log lines; default: one logger for each module.
    worker: the first part of the worker's name; default: the host's name.

    Durations are texts such as ``"24h"``, or numbers of seconds.
    """

    def __init__(
        self,
        name: str,
        source: Source | str,
        *,
        to: Publisher | str,
        store: Any = None,
        dead_to: Publisher | str | None = None,
        on_dead: Literal["skip", "block"] = "skip",
        retry: Retry | str | None = None,
        max_attempts: int = 5,
        decoder: Decoder | None = None,
        ids: Ids = "required",
        window: int = 5000,
        window_bytes: int = 4_000_000,
        concurrency: int = 16,
        grace: Duration = "20s",
        keep_dead: Duration = "7d",
        keep_inbox: Duration = "8d",
        keep_keys: Duration = "24h",
        prune_every: Duration = "1h",
        replay_every: Duration = "5s",
        observers: Sequence[Observer] = (),
        listen: str | None = None,
        logger: logging.Logger | None = None,
        worker: str | None = None,
    ) -> None:
        _check_consumer(name)
        self.name = name
        self._subject = Subject("consumer", name)
        self._check_numbers(
            window=window, window_bytes=window_bytes, concurrency=concurrency, max_attempts=max_attempts
        )
        self._check_on_dead(on_dead, store, dead_to)
        self._check_decoder(decoder)
        if decoder is not None and ids != "required":
            raise ConfigError(f"{self._subject}: ids={ids!r} is for the built-in decoder; leave out ids or decoder")
        self._keep_dead_seconds = seconds_of("keep_dead", keep_dead)
        self._keep_inbox_seconds = seconds_of("keep_inbox", keep_inbox)
        self._keep_keys_seconds = seconds_of("keep_keys", keep_keys)
        self._prune_seconds = seconds_of("prune_every", prune_every, "1ms")
        self._replay_seconds = seconds_of("replay_every", replay_every, "1ms")
        self._logger = logger
        self._log = logger or log
        own = Observers(observers, logger or log)
        self.source = _source_of(source)
        self.store = None if store is None else store_of(store)
        self._dead_to = publisher_from_url(dead_to) if isinstance(dead_to, str) else dead_to
        needs = Needs(name, concurrency, on_dead == "block", "skip")
        self._to = to
        prepared = prepared_publisher(_publisher_of(to), needs, self._subject, on_dead)
        publisher = observed_publisher(prepared, own, "consume")
        try:
            policy = RETRY if retry is None else retry_of(retry)
        except ConfigError as error:
            raise ConfigError(f"{self._subject}: {error}") from None
        self._job = Job(
            name,
            worker_name(worker),
            self.source,
            publisher,
            self._letters(on_dead),
            Rules(policy, max_attempts, OnDead.SKIP, logger=logger),
            make_decoder(ids=ids) if decoder is None else checked(decoder),
            window,
            window_bytes,
            seconds_of("grace", grace),
            own,
            logger,
            self._letters_at(),
        )
        self._supervisor: Supervisor | None = None
        #: Answers ``/livez``, ``/readyz`` and ``/metrics``; an ASGI application that can be mounted.
        self.health = Health(self, observers)
        self._server = None if listen is None else HealthServer(listen, self.health, logger=logger)

    def _letters(self, on_dead: str) -> Letters | None:
        if on_dead == "block":
            return None
        if self.store is not None:
            return StoreLetters(self.store, self.name)
        assert self._dead_to is not None
        return SentLetters(self._dead_to, self.name)

    def _letters_at(self) -> str:
        """The destination of dead letters, for logs; empty: the store, or nowhere."""
        if self._dead_to is None:
            return ""
        return f"{self._dead_to.description} {self._dead_to.default_address}".rstrip()

    def _check_numbers(self, **settings: Any) -> None:
        limits = {"window": 1_000_000, "window_bytes": 1 << 30, "concurrency": 10_000, "max_attempts": 1_000_000}
        for setting, value in settings.items():
            if type(value) is not int or not 1 <= value <= limits[setting]:
                raise ConfigError(f"{self._subject}: {setting} is {value!r}; use 1 to {limits[setting]}")

    def _check_on_dead(self, on_dead: Any, store: Any, dead_to: Any) -> None:
        known = ("skip", "block")
        if on_dead not in known:
            raise ConfigError(f"{self._subject}: on_dead={on_dead!r}: {hint(str(on_dead), known)}")
        if store is not None and dead_to is not None:
            raise ConfigError(f"{self._subject}: dead letters go into the store; leave out dead_to, or the store")
        if on_dead == "block" and dead_to is not None:
            raise ConfigError(f"{self._subject}: with on_dead='block' no event goes to dead_to; leave out one of them")
        if on_dead == "skip" and store is None and dead_to is None:
            raise ConfigError(
                f"{self._subject} has no place for dead events; give it store=, or dead_to= with a publisher or its "
                'URL, or on_dead="block"'
            )

    def _check_decoder(self, decoder: Any) -> None:
        if decoder is None or (callable(decoder) and not iscoroutinefunction(decoder)):
            return
        what = "async" if callable(decoder) else f"a {type(decoder).__name__}"
        raise ConfigError(f"{self._subject}: decoder is {what}; pass a plain function of a message")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """For an ASGI application: the consumer runs as long as the application does.

        The application starts at once. The consumer connects in the background. If it fails, the application lives on:
        ask ``state``, or ``ready()``."""
        async with self:
            yield

    @property
    def state(self) -> State:
        """``starting``, ``running``, ``failed`` or ``stopped``."""
        return State.STOPPED if self._supervisor is None else self._supervisor.state

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, if its state is ``failed``."""
        return None if self._supervisor is None else self._supervisor.error

    @property
    def port(self) -> int | None:
        """The port that ``listen`` got; None: it listens on none."""
        return None if self._server is None else self._server.port

    def troubles(self) -> Sequence[str]:
        """Why a restart of this process would help, a sentence each; none: it is live."""
        return [f"{self._subject} has failed and does not start again by itself"] if self.state is State.FAILED else []

    def missing(self) -> Sequence[str]:
        """The parts that do not serve; none: it is ready."""
        return ["start"] if self._supervisor is None else sorted(self._supervisor.readiness.missing)

    def circuits(self) -> Mapping[str, str]:
        """By the consumer's name: ``closed``, or ``open`` and ``half_open`` while its destination is away."""
        return {} if self._supervisor is None else {self.name: self._supervisor.circuit}

    async def start(self) -> None:
        """Begin to work, in the background. A database or broker that is not there yet is waited for."""
        if self._supervisor is not None and self._supervisor.running:
            raise ConfigError("this consumer runs already; make another object for a second one")
        self._tell_other_inboxes()
        if self._server is not None:
            await self._server.start()
        self._supervisor = Supervisor(self._job, self.store, self._dead_to, self._services)
        self._supervisor.start()

    def _tell_other_inboxes(self) -> None:
        """A dead letter counts as applied under the consumer's name, which an inbox of another name does not see."""
        if self.store is None or not isinstance(self._to, Handlers):
            return
        for handler, inbox in self._to.inboxes().items():
            if inbox != self.name:
                self._log.warning(
                    "%s: handler %s records its events in Inbox(%r), so a copy of an event that is a dead letter would "
                    "be applied; give consumer and inbox the same name",
                    self._subject,
                    handler,
                    inbox,
                    extra=self._subject.fields("other_inbox"),
                )

    def _services(self, runner: Runner) -> list[Service]:
        store, job, logger = self.store, self._job, self._logger
        if store is None:
            return []
        prune = Prune(
            store,
            keep_published=None,
            keep_dead=self._keep_dead_seconds,
            keep_inbox=self._keep_inbox_seconds,
            keep_keys=self._keep_keys_seconds,
            every=self._prune_seconds,
            logger=logger,
        )
        replays = Replays(store, job, runner.destination, every=self._replay_seconds, logger=logger)
        return [prune, replays, Reports(store, job, runner.report, logger=logger)]

    async def ready(self) -> None:
        """Wait until the source is open. Raises an error that no waiting mends, and the error of a consumer that has
        failed."""
        await self._running("ready").readiness.wait()

    async def stop(self) -> None:
        """Finish the events in work, settle them, and disconnect, within ``grace``. Safe to call twice."""
        supervisor = self._supervisor
        if supervisor is None or not supervisor.running:
            return
        await supervisor.stop()
        if self._server is not None:
            await self._server.close()
        fields = self._subject.fields("stopped", worker=self._job.worker)
        self._log.info("%s stopped", self._subject, extra=fields)

    def _running(self, asked: str) -> Supervisor:
        if self._supervisor is None or not self._supervisor.running:
            raise ConfigError(
                f"{asked}() needs a consumer that runs; call it inside `async with consumer:` or after start()"
            )
        return self._supervisor

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT, as the only task of this process. Raises the error of a consumer that fails."""
        await run_until_asked(
            self.start,
            self.stop,
            lambda: self._running("run").readiness,
            lambda: self._running("run").failed(),
        )


def _check_consumer(name: Any) -> None:
    try:
        check_name("consumer", name)
    except InvalidEvent as error:
        raise ConfigError(f"the name of a consumer cannot be used: {error}") from None


def _source_of(source: Any) -> Source:
    if isinstance(source, str):
        return source_from_url(source)
    if isinstance(source, type) or not hasattr(source, "receive"):
        raise ConfigError(
            f"a {type(source).__name__} is no source; pass a URL such as kafka://host?topic=..., or a Source"
        )
    found: Source = source
    return found


def _publisher_of(to: Any) -> Publisher | str:
    if not isinstance(to, str | Publisher):
        raise ConfigError(
            f"a {type(to).__name__} is no destination; register functions with Handlers, or pass a publisher or its URL"
        )
    return to
