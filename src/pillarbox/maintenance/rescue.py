"""Rescue: takes events of queue streams from workers that died or hang."""

import logging

from pillarbox.durations import Duration, seconds_of
from pillarbox.maintenance.service import Service
from pillarbox.store import Claims, Rescued


class Rescue(Service):
    """Looks for leases that ran out, and for events held longer than ``stuck``, in one queue stream."""

    name = "rescue"

    def __init__(
        self,
        store: Claims,
        stream: str,
        *,
        stuck: Duration = "10m",
        every: Duration = "20s",
        batch: int = 500,
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__(every, logger)
        self._store = store
        self._stream = stream
        self._stuck_seconds = seconds_of("stuck", stuck)
        self._batch = batch

    async def run_once(self) -> Rescued:
        retried = dead = 0
        while True:
            done = await self._store.rescue(self._stream, self._stuck_seconds, self._batch)
            retried += done.retried
            dead += done.dead
            if done.retried + done.dead < self._batch:
                break
        if retried or dead:
            died = f"; {dead:,} of them are dead; see: pillarbox dead list --stream {self._stream}" if dead else ""
            self._log.log(
                logging.ERROR if dead else logging.WARNING,
                "stream '%s': rescued %d events of workers that died or hang%s",
                self._stream,
                retried + dead,
                died,
                extra={"action": "rescued", "stream": self._stream, "retried": retried, "dead": dead},
            )
        return Rescued(retried, dead)
