"""The supervisor of a relay: it starts streams and services, stops them, and restarts a stream that fails."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pillarbox.errors import ConfigError, Outage, PillarboxError, StoreDown, StoreError
from pillarbox.event import Mode
from pillarbox.maintenance.service import Service
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.breaker import Circuit
from pillarbox.relay.deadline import Deadline, Step
from pillarbox.relay.destination import CLOSE_SECONDS, Destination, close
from pillarbox.relay.loop import Loop, Worker
from pillarbox.relay.ordered.worker import OrderedWorker
from pillarbox.relay.queue.worker import QueueWorker
from pillarbox.relay.readiness import Readiness
from pillarbox.relay.subject import stream_named
from pillarbox.store import Store
from pillarbox.tasks import ended

log = logging.getLogger(__name__)

_RESTART_SECONDS = (1.0, 30.0)
_CONNECT_SECONDS = 5.0
_CANCEL_SECONDS = 0.5
_STUCK_SECONDS = 300.0  # far above the time limit of every call to a database
_STORE = "the store"


class StreamRunner:
    """Serves one stream: opens its publisher, runs a worker, and starts again when something fails."""

    def __init__(self, job: Assignment, readiness: Readiness) -> None:
        self.worker: Worker | None = None
        self._job = job
        self._stream = job.stream.name
        self._log = job.logger or log
        self._readiness = readiness
        self._loop: Loop | None = None
        self._destination: Destination | None = None
        self._deadline: Deadline | None = None
        self._serves = asyncio.Event()
        self._stopping = asyncio.Event()

    def wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    @property
    def circuit(self) -> str:
        """The state of the circuit in front of the destination."""
        return str(Circuit.CLOSED if self._destination is None else self._destination.circuit)

    def stuck_seconds(self, now: float) -> float:
        """How long its loop has not turned. While it waits for its destination or for a restart it has none."""
        return 0.0 if self._loop is None or self._stopping.is_set() else now - self._loop.turned_at

    def stop(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._stopping.set()
        self._serves.set()  # so that a drain does not wait for a restart
        if self._loop is not None:
            self._loop.stop(deadline)

    def failed(self) -> None:
        """Let a drain see that a start failed."""
        self._serves.set()

    async def drain(self) -> None:
        """Wait until no event is ready to be published, over restarts, or until stop.

        Raises the error of a start that failed, if no wait would help."""
        while not self._stopping.is_set():
            await self._serves.wait()
            if (error := self._readiness.error(self._stream, _STORE)) is not None:
                raise error
            if self._loop is not None and await self._loop.drained():
                return
            self._serves.clear()  # until the restart

    async def run(self) -> None:
        """Run until stop. After each failure it waits longer before it starts again."""
        first, longest = _RESTART_SECONDS
        wait, clock = first, asyncio.get_running_loop()
        while not self._stopping.is_set():
            begun = clock.time()
            try:
                await self._serve()
                continue
            except Exception as error:
                if clock.time() - begun > longest:
                    wait = first
                lasting = isinstance(error, ConfigError | StoreError)
                if not lasting or self._readiness.failed(self._stream, error):
                    self._tell(error, wait)
                if lasting:
                    self.failed()
            await self._pause(wait)
            wait = min(longest, wait * 2)

    def _tell(self, error: Exception, wait: float) -> None:
        # Our own errors say what to do; only an unexpected error needs a traceback.
        self._log.error(
            "stream '%s' failed (%s: %s); starting it again in %.0f s",
            self._stream,
            type(error).__name__,
            error,
            wait,
            exc_info=None if isinstance(error, PillarboxError) else error,
            extra={"action": "restarting", "stream": self._stream},
        )

    async def _serve(self) -> None:
        try:
            if self._job.publisher.features.exactly_once and not self._job.store.features.transactions:
                raise ConfigError(
                    f"stream '{self._stream}': exactly once needs transactions, and {self._job.store.description} has "
                    "none; use a replica set, even of one node, or leave out delivery=exactly-once"
                )
            if not await self._open_publisher():
                return
            kind = QueueWorker if self._job.stream.mode is Mode.QUEUE else OrderedWorker
            job = self._job
            self._destination = Destination(stream_named(self._stream), job.publisher, job.observers, job.logger)
            self.worker = kind(job, self._destination)
            self._loop = Loop(self._job, self.worker, lambda: self._readiness.serves(self._stream))
            self._serves.set()
            if not self._stopping.is_set():
                await self._loop.run()
        finally:
            self._serves.clear()
            self._readiness.leaves(self._stream)
            self._loop = self.worker = None
            seconds = CLOSE_SECONDS if self._deadline is None else self._deadline.left(Step.CLOSE)
            await close(self._job.publisher, seconds, logger=self._log)

    async def _open_publisher(self) -> bool:
        """Wait for a destination that is not there yet. False: told to stop meanwhile."""
        logged = False
        while not self._stopping.is_set():
            try:
                await self._job.publisher.open()
                return True
            except Outage as error:
                if not logged:
                    self._log.warning(
                        "stream '%s': %s; trying again every few seconds",
                        self._stream,
                        error,
                        extra={"action": "destination_down", "stream": self._stream},
                    )
                logged = True
            await self._pause(_CONNECT_SECONDS)
        return False

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


class Supervisor:
    """Runs the streams and services of a relay on one store, each in a task of its own. It can be started once."""

    def __init__(
        self,
        store: Store,
        jobs: Sequence[Assignment],
        services: Sequence[Service],
        grace_seconds: float,
        logger: logging.Logger | None = None,
    ) -> None:
        names = [job.stream.name for job in jobs]
        self.readiness = Readiness([_STORE, *names])
        self.runners = {job.stream.name: StreamRunner(job, self.readiness) for job in jobs}
        self._store = store
        self._jobs = jobs
        self._services = services
        self._grace = grace_seconds
        self._log = logger or log
        self._is_open = False  # the store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped. What ran in an event loop that is closed runs no more."""
        return self._loop is not None and not self._loop.is_closed() and self._stopping is None

    def troubles(self) -> Sequence[str]:
        """Why a restart of the process would help. Every call to a database or a destination has a time limit, so that
        an outage of either does not stop the loops."""
        found = []
        if self.running and self._task is not None and self._task.done():
            found.append("the relay has ended")
        for name, runner in self.runners.items():
            seconds = runner.stuck_seconds(time.monotonic())
            if seconds > _STUCK_SECONDS:
                found.append(f"stream '{name}' has done nothing for {seconds:.0f} s")
        return found

    def missing(self) -> Sequence[str]:
        """The parts that do not serve."""
        return [part if part in (_STORE, "stop") else f"stream '{part}'" for part in self.readiness.missing]

    def circuits(self) -> Mapping[str, str]:
        """By stream: the state of its destination's circuit."""
        return {name: runner.circuit for name, runner in self.runners.items()}

    def start(self) -> None:
        """Connect and serve in the background."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="pillarbox-relay")

    async def drain(self) -> None:
        for runner in self.runners.values():
            await runner.drain()

    async def stop(self) -> None:
        """Finish or give back all work, and close the store, within the grace. Safe to call twice."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="pillarbox-stop")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        deadline = Deadline(self._grace)
        for runner in self.runners.values():
            runner.stop(deadline)
        for service in self._services:
            service.stop()
        self.readiness.stopped()
        if self._task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.left(Step.SETTLE)):
                    await (asyncio.wait([self._task]) if self._is_open else ended(self._task))
            if not self._task.done():
                self._log.error(
                    "the relay did not stop within %g s; what still runs is left behind",
                    self._grace,
                    extra={"action": "left_behind"},
                )
                self._task.cancel()
                await asyncio.wait([self._task], timeout=_CANCEL_SECONDS)
        if self._is_open:
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.left(Step.LEAVE)):
                    await self._store.close()

    async def _run(self) -> None:
        await self._open_store()
        self._log.info(
            "relay %s serves %s of %s",
            self._jobs[0].worker,
            ", ".join(f"'{job.stream.name}' to {job.publisher.description}" for job in self._jobs),
            self._store.description,
            extra={"action": "started", "worker": self._jobs[0].worker},
        )
        async with asyncio.TaskGroup() as group:
            for name, runner in self.runners.items():
                group.create_task(runner.run(), name=f"pillarbox-{name}")
            for service in self._services:
                group.create_task(service.run(), name=f"pillarbox-{service.name}")

    def _wake(self, stream: str) -> None:
        if stream in self.runners:
            self.runners[stream].wake()

    async def _open_store(self) -> None:
        """Wait for a database that is not there yet, or that refuses until somebody acts."""
        told = False
        while True:
            try:
                await self._store.open(self._wake)
                break
            except StoreDown as error:
                if not told:
                    self._log.warning("%s; trying again every few seconds", error, extra={"action": "store_down"})
            except Exception as error:
                if self.readiness.failed(_STORE, error):
                    self._log.error(
                        "%s",
                        error,
                        exc_info=None if isinstance(error, PillarboxError) else error,
                        extra={"action": "store_refused"},
                    )
                for runner in self.runners.values():
                    runner.failed()
            told = True
            await asyncio.sleep(_CONNECT_SECONDS)
        self._is_open = True
        if told:
            self._log.warning("%s answers now", self._store.description, extra={"action": "store_up"})
        self.readiness.serves(_STORE)
