"""Prune: deletes what is old enough: published events, dead letters, rows of the inbox and idempotency keys."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from pillarbox.durations import Duration, seconds_of
from pillarbox.maintenance.service import Service
from pillarbox.store import Retention


class Pruned(NamedTuple):
    """The number of rows that a run deleted."""

    published: int = 0
    dead: int = 0
    inbox: int = 0
    keys: int = 0


class Prune(Service):
    """Deletes in batches, so that no statement holds locks for long; ``limit`` bounds one run of each kind.

    keep_published: None deletes no published events: a consumer leaves them to the relays."""

    name = "prune"
    first_seconds = 60.0  # a relay that starts publishes its backlog first

    def __init__(
        self,
        store: Retention,
        *,
        keep_published: Duration | None = "24h",
        keep_dead: Duration = "7d",
        keep_inbox: Duration = "8d",
        keep_keys: Duration = "24h",
        every: Duration = "1h",
        batch: int = 1000,
        limit: int = 10_000_000,
        on_progress: Callable[[Pruned], None] = lambda so_far: None,
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__(every, logger)
        self._store = store
        self._keep_published_seconds = None if keep_published is None else seconds_of("keep_published", keep_published)
        self._keep_dead_seconds = seconds_of("keep_dead", keep_dead)
        self._keep_inbox_seconds = seconds_of("keep_inbox", keep_inbox)
        self._keep_keys_seconds = seconds_of("keep_keys", keep_keys)
        self._batch = batch
        self._limit = limit
        self._on_progress = on_progress

    async def run_once(self) -> Pruned:
        done = (
            Pruned()
            if self._keep_published_seconds is None
            else await self._prune_published(self._keep_published_seconds)
        )
        for kind, prune, keep_seconds in (
            ("dead", self._store.prune_dead, self._keep_dead_seconds),
            ("inbox", self._store.prune_inbox, self._keep_inbox_seconds),
            ("keys", self._store.prune_idempotency, self._keep_keys_seconds),
        ):
            total = 0
            while total < self._limit:
                deleted = await prune(keep_seconds, self._batch)
                total += deleted
                done = done._replace(**{kind: total})
                self._on_progress(done)
                if deleted < self._batch:
                    break
        if any(done):
            self._log.info(
                "pruned %d published events, %d dead letters, %d rows of the inbox and %d idempotency keys",
                *done,
                extra={"action": "pruned", **done._asdict()},
            )
        return done

    async def _prune_published(self, keep_seconds: float) -> Pruned:
        done, after = Pruned(), None
        while done.published < self._limit:
            page = await self._store.prune_published(keep_seconds, self._batch, after)
            done = Pruned(done.published + page.deleted)
            self._on_progress(done)
            after = page.after
            if after is None:
                break
        return done
