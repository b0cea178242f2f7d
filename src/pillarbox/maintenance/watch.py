"""Watch: warns of events in a stream that no relay serves, for example after a misspelt name."""

import logging
from collections.abc import Collection, Sequence

from pillarbox.durations import Duration
from pillarbox.maintenance.service import Service
from pillarbox.store import Insights


class Watch(Service):
    """Warns once for each such stream, and again if it was served in between.

    own: the streams of this relay. While it cannot reach the destination of one, another line says so.
    """

    name = "watch"
    first_seconds = float("inf")  # the workers of this relay have yet to join

    def __init__(
        self,
        store: Insights,
        *,
        own: Collection[str] = (),
        every: Duration = "1m",
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__(every, logger)
        self._store = store
        self._own = frozenset(own)
        self._told: set[str] = set()

    async def run_once(self) -> Sequence[str]:
        streams = [stream for stream in await self._store.unserved() if stream not in self._own]
        for stream in streams:
            if stream not in self._told:
                self._log.warning(
                    "events wait in stream '%s' and no relay serves it; add it to a relay, or correct the writer",
                    stream,
                    extra={"action": "unserved", "stream": stream},
                )
        self._told = set(streams)
        return streams
