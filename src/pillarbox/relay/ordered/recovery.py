"""Recovery of a shard whose destination keeps its progress: what was published and is not settled is settled, before
anything is read. docs/decisions/0036-exactly-once-into-kafka.md has the protocol."""

import logging
import time
from typing import TYPE_CHECKING

from pillarbox.errors import LeaseLost
from pillarbox.publisher import Place
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.destination import Destination

if TYPE_CHECKING:
    from pillarbox.relay.ordered.ownership import Shard

log = logging.getLogger(__name__)

_NAMED = 5  # ids in a log line


class Recovery:
    """Makes shards ready to publish. It does nothing where the destination does not keep their progress."""

    def __init__(self, job: Assignment, destination: Destination) -> None:
        self.needed = destination.features.exactly_once
        self._destination = destination
        self._store = job.store
        self._lease_seconds = job.stream.lease_seconds
        self._keep_published = job.rules.keep_published
        self._log = job.logger or log

    async def ready(self, shard: "Shard") -> bool:
        """Whether events of the shard can be read now: nothing was published that is not settled. Marks a shard that is
        lost."""
        if not self.needed or shard.recovered:
            return True
        if shard.lost or self._destination.given_up.is_set():
            return False
        if not await self._still_owned(shard):
            shard.lost = True
            return False
        place = await self._place(shard)
        ticket = await self._destination.recover(place)
        if ticket is None:
            return False
        try:
            progress = await self._store.settle_ticket(shard.grant, ticket, keep_published=self._keep_published)
        except LeaseLost:
            shard.lost = True
            return False
        shard.settled_batch, shard.recovered = progress.batch, True
        fields = {"stream": place.stream, "shard": place.shard}
        if progress.settled:
            self._log.info(
                "stream '%s': settled %d events of shard %d that were published before",
                place.stream,
                progress.settled,
                place.shard,
                extra={"action": "recovered", **fields, "count": progress.settled},
            )
        if progress.gone:
            self._log.error(
                "stream '%s': %d events of shard %d were published, and the database has lost them: %s",
                place.stream,
                len(progress.gone),
                place.shard,
                ", ".join(map(str, progress.gone[:_NAMED])) + (" ..." if len(progress.gone) > _NAMED else ""),
                extra={"action": "events_gone", **fields, "count": len(progress.gone)},
            )
        return True

    async def fits(self, shard: "Shard") -> bool:
        """Whether the database still knows of the last batch, so that events that were read can be published. It does
        not if it was restored, or failed over to a standby that lagged behind: they may be in the destination already.
        Marks a shard that is lost."""
        try:
            if await self._store.settled_batch(shard.grant) == shard.settled_batch:
                return True
        except LeaseLost:
            shard.lost = True
        shard.recovered = False
        return False

    async def _still_owned(self, shard: "Shard") -> bool:
        """Recovery ends every earlier producer of the shard. A worker that has lost it would end the new owner's."""
        if shard.place is None and time.monotonic() <= shard.publish_until:
            return True
        return bool(await self._store.renew([shard.grant], self._lease_seconds))

    async def _place(self, shard: "Shard") -> Place:
        if shard.place is None:
            grant = shard.grant
            shard.place = Place(
                await self._store.identity(), grant.stream, grant.shard, self._store.shards, grant.token
            )
        return shard.place
