"""Which shards of an ordered stream this worker owns: a fair share, renewed in time, handed over between turns."""

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from uuid import UUID

from pillarbox.errors import LeaseLost, StoreDown
from pillarbox.event import Status
from pillarbox.relay.pace import BatchSize, Caution
from pillarbox.relay.stream import Stream
from pillarbox.store import Grant, Store, Work

log = logging.getLogger(__name__)


def quota(shards: int, live: int, rank: int) -> int:
    """How many shards the live worker of this rank should own, so that all are owned and none has two too many."""
    live = max(1, live)
    return shards // live + (rank < shards % live)


@dataclass(slots=True, eq=False)
class Shard:
    """One owned shard and what this worker remembers of it; the database alone is the truth."""

    grant: Grant
    aside: set[str] | None  # the keys that are set aside; None: not asked yet
    batch: BatchSize
    publish_until: float  # by the local monotonic clock: past it, another worker may own the shard
    caution: Caution
    leaving: bool = False  # above this worker's share: no turn begins on it
    look_for_due_at: float = 0.0  # when to ask again for a key whose time has come
    charge: UUID | None = None  # the event that the last owner was alone with when it died

    @property
    def alone(self) -> bool:
        """Whether its events are published one by one, each noted before: owner after owner died with this shard."""
        return self.caution.limit == 1

    @property
    def limit(self) -> int:
        return min(self.batch.size, self.caution.limit or self.batch.size)


@dataclass(slots=True)
class Ownership:
    """The shards of one stream that this worker owns."""

    store: Store
    stream: Stream
    worker: str
    first_batch: int
    shards: dict[int, Shard] = field(default_factory=dict)
    batch: BatchSize = field(init=False)  # one for all shards: they share the destination

    def __post_init__(self) -> None:
        self.batch = BatchSize(self.stream.batch, self.first_batch)

    def owns(self, shard: Shard) -> bool:
        return self.shards.get(shard.grant.shard) is shard

    async def adjust(self, work: Work, in_turn: Collection[Shard]) -> bool:
        """Take what is missing from the fair share, give what is above it. Whether shards were taken: they may have
        work.

        A shard in the middle of a turn is marked, and given when the turn has ended.
        """
        share = quota(self.store.shards, work.live, work.rank)
        for shard in self.shards.values():
            shard.leaving = False
        if len(self.shards) < share and work.free:
            return await self._take(share - len(self.shards))
        if len(self.shards) > share:
            at_rest_first = sorted(self.shards.values(), key=lambda shard: (shard in in_turn, shard.grant.shard))
            spare = at_rest_first[: len(self.shards) - share]
            for shard in spare:
                shard.leaving = shard in in_turn
            await self.give([shard for shard in spare if not shard.leaving])
        return False

    async def _take(self, limit: int) -> bool:
        sent = time.monotonic()
        name, lease = self.stream.name, self.stream.lease_seconds
        taken = False
        for grant in await self.store.take(name, self.worker, limit, lease):
            deaths = await self._deaths(grant)
            if grant.unclean_count:
                log.warning(
                    "stream '%s': took over shard %d from a worker that died (%d in a row)",
                    name,
                    grant.shard,
                    grant.unclean_count,
                    extra={"action": "took_over", "stream": name, "shard": grant.shard},
                )
            until = sent + lease * 2 / 3
            # Only one that worked alone had noted the very event that it died with; others note the first of several.
            charge = grant.suspect if Caution(grant.unclean_count - 1).limit == 1 else None
            self.shards[grant.shard] = Shard(grant, None, self.batch, until, Caution(deaths), charge=charge)
            taken = True
        return taken

    async def _deaths(self, grant: Grant) -> int:
        """Of how many owners this shard may be the cause. One that was careful had noted what it was about to send: if
        all of that is settled, it did not die of it."""
        deaths = grant.unclean_count
        if deaths < 2:
            return deaths
        try:
            found = None if grant.suspect is None else await self.store.look(grant.suspect)
            if found is not None and found.event.status not in (Status.PUBLISHED, Status.DEAD):
                # So that what the next owner finds noted is this one's own.
                await self.store.suspect(grant, None)
                return deaths
            await self.store.trust(grant, deaths - 1)
        except (StoreDown, LeaseLost):
            return deaths  # the shard is ours, or the next turn finds that it is not
        return deaths - 1

    async def renew(self) -> None:
        """Extend every lease, and forget the shards that are lost."""
        grants = [shard.grant for shard in self.shards.values()]
        sent = time.monotonic()
        held = set(await self.store.renew(grants, self.stream.lease_seconds))
        for grant in grants:
            shard = self.shards.get(grant.shard)
            if shard is None or shard.grant != grant:
                continue
            if grant in held:
                shard.publish_until = sent + self.stream.lease_seconds * 2 / 3
            else:
                self.drop(shard)

    def drop(self, shard: Shard) -> None:
        """The lease is lost: another worker owns this shard now."""
        if self.owns(shard):
            del self.shards[shard.grant.shard]
            log.warning(
                "stream '%s': lost shard %d to another worker",
                self.stream.name,
                shard.grant.shard,
                extra={"action": "lease_lost", "stream": self.stream.name, "shard": shard.grant.shard},
            )

    async def give(self, shards: Iterable[Shard]) -> None:
        grants = []
        for shard in shards:
            self.shards.pop(shard.grant.shard, None)
            grants.append(shard.grant)
        if grants:
            await self.store.give(grants)
