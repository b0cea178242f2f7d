"""Rescue: takes events of queue streams from workers that died or hang."""

import logging

from pillarbox.maintenance.service import Service
from pillarbox.store import Claims, Rescued


class Rescue(Service):
    """Looks for leases that ran out, and for events held longer than ``stuck_seconds``, in one queue stream."""

    name = "rescue"

    def __init__(
        self,
        store: Claims,
        stream: str,
        *,
        stuck_seconds: float = 600.0,
        interval_seconds: float = 20.0,
        batch: int = 500,
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__(interval_seconds, logger)
        self._store = store
        self._stream = stream
        self._stuck = stuck_seconds
        self._batch = batch

    async def run_once(self) -> Rescued:
        retried = dead = 0
        while True:
            done = await self._store.rescue(self._stream, self._stuck, self._batch)
            retried += done.retried
            dead += done.dead
            if done.retried + done.dead < self._batch:
                break
        if retried or dead:
            self._log.warning(
                "stream '%s': rescued %d events of workers that died or hang, %d of them dead",
                self._stream,
                retried + dead,
                dead,
                extra={"action": "rescued", "stream": self._stream, "retried": retried, "dead": dead},
            )
        return Rescued(retried, dead)
