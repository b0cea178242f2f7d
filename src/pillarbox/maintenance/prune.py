"""Prune: deletes published events and dead letters that are old enough."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from pillarbox.durations import Duration, seconds_of
from pillarbox.maintenance.service import Service
from pillarbox.store import Retention


class Pruned(NamedTuple):
    """The number of rows that a run deleted."""

    published: int
    dead: int


class Prune(Service):
    """Deletes in batches, so that no statement holds locks for long; ``limit`` bounds one run of each kind."""

    name = "prune"
    first_seconds = 60.0  # a relay that starts publishes its backlog first

    def __init__(
        self,
        store: Retention,
        *,
        keep_published: Duration = "24h",
        keep_dead: Duration = "7d",
        every: Duration = "1h",
        batch: int = 1000,
        limit: int = 10_000_000,
        on_progress: Callable[[Pruned], None] = lambda so_far: None,
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__(every, logger)
        self._store = store
        self._keep_published_seconds = seconds_of("keep_published", keep_published)
        self._keep_dead_seconds = seconds_of("keep_dead", keep_dead)
        self._batch = batch
        self._limit = limit
        self._on_progress = on_progress

    async def run_once(self) -> Pruned:
        published = dead = 0
        after = None
        while published < self._limit:
            page = await self._store.prune_published(self._keep_published_seconds, self._batch, after)
            published += page.deleted
            self._on_progress(Pruned(published, dead))
            after = page.after
            if after is None:
                break
        while dead < self._limit:
            deleted = await self._store.prune_dead(self._keep_dead_seconds, self._batch)
            dead += deleted
            self._on_progress(Pruned(published, dead))
            if deleted < self._batch:
                break
        if published or dead:
            self._log.info(
                "pruned %d published events and %d dead letters",
                published,
                dead,
                extra={"action": "pruned", "published": published, "dead": dead},
            )
        return Pruned(published, dead)
