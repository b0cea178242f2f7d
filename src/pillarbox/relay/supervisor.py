"""The supervisor of a relay: it starts streams and services, stops them, and restarts a stream that fails."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from pillarbox.errors import ConfigError, Outage, PillarboxError, StoreDown
from pillarbox.event import Mode
from pillarbox.maintenance.service import Service
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.destination import Destination, close
from pillarbox.relay.loop import Loop, Worker
from pillarbox.relay.ordered.worker import OrderedWorker
from pillarbox.relay.queue.worker import QueueWorker
from pillarbox.store import Store

log = logging.getLogger(__name__)

_RESTART_SECONDS = (1.0, 30.0)
_CONNECT_SECONDS = 5.0


class StreamRunner:
    """Serves one stream: opens its publisher, runs a worker, and starts again when something fails."""

    def __init__(self, job: Assignment) -> None:
        self.worker: Worker | None = None
        self._job = job
        self._stream = job.stream.name
        self._log = job.logger or log
        self._loop: Loop | None = None
        self._error: ConfigError | None = None  # of the last start
        self._serves = asyncio.Event()
        self._stopping = asyncio.Event()

    def wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def stop(self) -> None:
        self._stopping.set()
        self._serves.set()  # so that a drain does not wait for a restart
        if self._loop is not None:
            self._loop.stop()

    async def drain(self) -> None:
        """Wait until no event is ready to be published, over restarts, or until stop.

        Raises the ConfigError of a start that failed, because no wait would help."""
        while not self._stopping.is_set():
            await self._serves.wait()
            if self._error is not None:
                raise self._error
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
                if isinstance(error, ConfigError):
                    self._error = error
                    self._serves.set()
            await self._pause(wait)
            wait = min(longest, wait * 2)

    async def _serve(self) -> None:
        try:
            if not await self._open_publisher():
                return
            kind = QueueWorker if self._job.stream.mode is Mode.QUEUE else OrderedWorker
            self.worker = kind(self._job, Destination(self._job))
            self._loop = Loop(self._job, self.worker)
            self._error = None
            self._serves.set()
            if not self._stopping.is_set():
                await self._loop.run()
        finally:
            self._serves.clear()
            self._loop = self.worker = None
            await close(self._job.publisher, logger=self._log)

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
        logger: logging.Logger | None = None,
    ) -> None:
        self.runners = {job.stream.name: StreamRunner(job) for job in jobs}
        self.running = self.stopped = False
        self._store = store
        self._services = services
        self._tasks: list[asyncio.Task[None]] = []
        self._log = logger or log

    async def start(self) -> None:
        """Open the store (waiting for a database that is not there yet) and start everything."""
        await self._open_store()
        for name, runner in self.runners.items():
            self._tasks.append(asyncio.create_task(runner.run(), name=f"pillarbox-{name}"))
        for service in self._services:
            self._tasks.append(asyncio.create_task(service.run(), name=f"pillarbox-{service.name}"))
        self.running = True

    async def stop(self) -> None:
        """Finish or give back all work, and close the store. Safe to call twice."""
        self.stopped = True
        for runner in self.runners.values():
            runner.stop()
        for service in self._services:
            service.stop()
        tasks, self._tasks = self._tasks, []
        self.running = False
        if tasks:
            await asyncio.wait(tasks)
        await self._store.close()

    async def drain(self) -> None:
        for runner in self.runners.values():
            await runner.drain()

    def _wake(self, stream: str) -> None:
        if stream in self.runners:
            self.runners[stream].wake()

    async def _open_store(self) -> None:
        logged = False
        while True:
            try:
                return await self._store.open(self._wake)
            except StoreDown as error:
                if not logged:
                    self._log.warning("%s; trying again every few seconds", error, extra={"action": "store_down"})
                logged = True
            except BaseException:
                await self._store.close()
                raise
            await asyncio.sleep(_CONNECT_SECONDS)
