"""The supervisor of a consumer: it opens store, destination and source, serves, and stops."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Final

from pillarbox.consumer.job import Job
from pillarbox.consumer.runner import Runner
from pillarbox.consumer.services import Replays
from pillarbox.errors import Outage, PillarboxError, StoreDown
from pillarbox.maintenance.service import Service
from pillarbox.publisher import Publisher
from pillarbox.relay.breaker import Circuit
from pillarbox.relay.deadline import Deadline, Step
from pillarbox.relay.destination import close
from pillarbox.relay.readiness import Readiness
from pillarbox.store import ConsumerReport, Store
from pillarbox.tasks import ended

log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 5.0
_CANCEL_SECONDS: Final = 0.5


class State(StrEnum):
    """The state of a consumer."""

    STARTING = "starting"  # it waits for its store, its destination or its broker
    RUNNING = "running"
    FAILED = "failed"  # it ended with an error, and does not start again by itself
    STOPPED = "stopped"


class Supervisor:
    """Runs a consumer once.

    store: None without one. dead_to: where dead events are sent, without a store. services: what runs beside it."""

    def __init__(
        self,
        job: Job,
        store: Store | None,
        dead_to: Publisher | None,
        services: Callable[[Runner], Sequence[Service]],
    ) -> None:
        parts = ["the store"] * (store is not None) + ["the destination", "the source"]
        self.readiness = Readiness(parts, "the consumer was stopped before it had its source")
        self.state = State.STARTING
        self.error: BaseException | None = None
        self._job = job
        self._store = store
        self._dead_to = dead_to
        self._log = job.logger or log
        self._runner: Runner | None = None
        self._services = services
        self._beside: Sequence[Service] = ()  # those that run
        self._opened: list[Callable[[Deadline], Awaitable[None]]] = []  # how to close what was opened
        self._deadline: Deadline | None = None
        self._stop_asked = asyncio.Event()
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped. What ran in an event loop that is closed runs no more."""
        return self._loop is not None and not self._loop.is_closed() and self._stopping is None

    @property
    def circuit(self) -> str:
        """The state of the circuit in front of the destination."""
        return str(Circuit.CLOSED if self._runner is None else self._runner.destination.circuit)

    def start(self) -> None:
        """Connect and serve in the background."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name=f"pillarbox-consumer-{self._job.name}")

    async def failed(self) -> None:
        """Wait until the consumer has failed, and raise its error."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    async def stop(self) -> None:
        """Finish what runs, settle, and disconnect, within the grace. Safe to call twice."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="pillarbox-stop")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._deadline = Deadline(self._job.grace_seconds)
        self._stop_asked.set()
        self.readiness.stopped()
        if self._runner is not None:
            self._runner.stop(self._deadline)
        for service in self._beside:
            service.stop()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=self._deadline.left(Step.LEAVE) + _CANCEL_SECONDS)
            if not self._task.done():
                self._log.error(
                    "%s did not stop within %g s; what still runs is left behind",
                    self._job.subject,
                    self._job.grace_seconds,
                    extra=self._job.subject.fields("left_behind"),
                )
                self._task.cancel()
                await asyncio.wait([self._task], timeout=_CANCEL_SECONDS)
        if self.state is not State.FAILED:
            self.state = State.STOPPED

    async def _run(self) -> None:
        try:
            if await self._open():
                await self._serve()
        except Exception as error:
            self._fail(error)
        finally:
            deadline = self._deadline or Deadline(self._job.grace_seconds)
            for end in reversed(self._opened):
                await self._close(end, deadline)
            self._ended.set()

    async def _close(self, end: Callable[[Deadline], Awaitable[None]], deadline: Deadline) -> None:
        """Close a part. One that raises must not keep the others open, nor hide why the consumer has failed."""
        try:
            await end(deadline)
        except Exception as error:
            self._log.error(
                "%s: a part cannot be closed and is left behind (%s: %s)",
                self._job.subject,
                type(error).__name__,
                error,
                exc_info=None if isinstance(error, PillarboxError) else error,
                extra=self._job.subject.fields("left_behind"),
            )

    def _fail(self, error: Exception) -> None:
        self.error, self.state = error, State.FAILED
        if self.readiness.failed("the source", error):
            self._log.error(
                "%s has failed and does not start again by itself (%s: %s)",
                self._job.subject,
                type(error).__name__,
                error,
                exc_info=None if isinstance(error, PillarboxError) else error,
                extra=self._job.subject.fields("consumer_failed"),
            )

    async def _open(self) -> bool:
        """Open one after the other, the source last. False: told to stop meanwhile."""
        job = self._job
        if self._store is not None:
            if not await self._open_part("the store", partial(self._open_store, self._store)):
                return False
            self._opened.append(partial(self._leave, self._store))
        for publisher in [job.publisher] if self._dead_to is None else [self._dead_to, job.publisher]:
            if not await self._open_part("the destination", publisher.open):
                return False
            self._opened.append(self._closing(publisher))
        runner = Runner(job)

        async def open_source() -> None:
            await job.source.open(job.name, runner)
            self._runner, self.state = runner, State.RUNNING

        return await self._open_part("the source", open_source)

    async def _open_store(self, store: Store) -> None:
        await store.open()
        # A database without transactions refuses it: now, and not when an event dies.
        nothing = ConsumerReport(self._job.source.description, 0, 0, 0, None, None)
        try:
            await store.report(self._job.name, self._job.worker, nothing, 1.0)
            await store.leave_consumer(self._job.name, self._job.worker)
        except BaseException:
            await store.close()
            raise

    async def _open_part(self, part: str, open_: Callable[[], Awaitable[None]]) -> bool:
        """Wait for what is not there yet, or refuses until somebody acts."""
        told = False
        while not self._stop_asked.is_set():
            opening = asyncio.ensure_future(open_())
            asked = asyncio.create_task(self._stop_asked.wait())
            try:
                await asyncio.wait([opening, asked], return_when=asyncio.FIRST_COMPLETED)
                if not opening.done():
                    await ended(opening)
                    return False
                opening.result()
                if told:
                    fields = self._job.subject.fields("opened", part=part)
                    self._log.warning("%s: %s answers now", self._job.subject, part, extra=fields)
                self.readiness.serves(part)
                return True
            except (Outage, StoreDown) as error:
                if not told:
                    self._tell_down(part, error)
            except Exception as error:
                if self.readiness.failed(part, error):
                    self._tell_refused(part, error)
            finally:
                await ended(asked)
            told = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop_asked.wait(), _CONNECT_SECONDS)
        return False

    def _tell_down(self, part: str, error: Exception) -> None:
        self._log.warning(
            "%s: %s; trying again every few seconds",
            self._job.subject,
            error,
            extra=self._job.subject.fields("open_failed", part=part),
        )

    def _tell_refused(self, part: str, error: Exception) -> None:
        self._log.error(
            "%s: %s",
            self._job.subject,
            error,
            exc_info=None if isinstance(error, PillarboxError) else error,
            extra=self._job.subject.fields("open_refused", part=part),
        )

    async def _serve(self) -> None:
        runner, job = self._runner, self._job
        assert runner is not None
        if self._deadline is not None:
            runner.stop(self._deadline)
        self._log.info(
            "%s reads %s and gives events to %s, as %s",
            job.subject,
            job.source.description,
            job.publisher.description,
            job.worker,
            extra=job.subject.fields("started", worker=job.worker),
        )
        services = self._beside = self._services(runner)
        tasks = [asyncio.create_task(each.run(), name=f"pillarbox-{each.name}") for each in services]
        try:
            await runner.run()
        finally:
            await _stopped(services, tasks, self._deadline or Deadline(job.grace_seconds))

    def _closing(self, publisher: Publisher) -> Callable[[Deadline], Awaitable[None]]:
        async def end(deadline: Deadline) -> None:
            await close(publisher, deadline.left(Step.SETTLE), self._log)

        return end

    async def _leave(self, store: Store, deadline: Deadline) -> None:
        with suppress(TimeoutError, PillarboxError):
            async with asyncio.timeout(deadline.left(Step.LEAVE)):
                await store.leave_consumer(self._job.name, self._job.worker)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.left(Step.LEAVE) + _CANCEL_SECONDS):
                await store.close()


async def _stopped(services: Sequence[Service], tasks: Sequence[asyncio.Task[None]], deadline: Deadline) -> None:
    for service in services:
        service.stop()
    # Handlers may run in a replay. They have as long as those of the runner.
    replays = [task for service, task in zip(services, tasks, strict=True) if isinstance(service, Replays)]
    if replays:
        await asyncio.wait(replays, timeout=deadline.left(Step.FINISH))
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
    for task in tasks:
        await ended(task)
