"""The shards of an ordered stream that a worker owns: a fair share, renewed in time, given away between turns."""

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pillarbox.errors import LeaseLost, StoreDown
from pillarbox.event import Status
from pillarbox.relay.assignment import Assignment
from pillarbox.relay.crash import CrashRule
from pillarbox.relay.pace import BatchSize
from pillarbox.store import Grant, Work

log = logging.getLogger(__name__)


def quota(shards: int, live: int, rank: int) -> int:
    """The fair share of one of ``live`` workers. The shares cover all shards and differ by one at most."""
    live = max(1, live)
    return shards // live + (rank < shards % live)


@dataclass(slots=True, eq=False)
class Shard:
    """One owned shard and what this worker remembers about it. The database alone is the truth."""

    grant: Grant
    batch: BatchSize
    crash_rule: CrashRule
    publish_until: float  # by the local monotonic clock; after it another worker may own the shard
    held_keys: set[str] = field(default_factory=set)
    asked: bool = False  # whether the held keys were read
    leaving: bool = False  # above this worker's share: no turn starts on it
    lost: bool = False  # a turn found out that another worker owns it
    check_due_at: float = 0.0  # when to ask again for a held key that is due

    @property
    def limit(self) -> int:
        """The most events that a turn reads."""
        return self.crash_rule.limit(self.batch.size)


class Ownership:
    """The shards of one stream that this worker owns."""

    def __init__(self, job: Assignment) -> None:
        self.shards: dict[int, Shard] = {}
        self._store = job.store
        self._stream = job.stream
        self._worker = job.worker
        # One for all shards: they share the destination.
        self._batch = BatchSize(job.stream.batch, job.publisher.features.first_batch)
        self._log = job.logger or log

    def owns(self, shard: Shard) -> bool:
        return self.shards.get(shard.grant.shard) is shard

    async def adjust(self, work: Work, in_turn: Collection[Shard]) -> bool:
        """Take shards up to the fair share, or give those above it. True: shards were taken and may have work.

        A shard in the middle of a turn is marked, and given when the turn has ended.
        """
        share = quota(self._store.shards, work.live, work.rank)
        for shard in self.shards.values():
            shard.leaving = False
        if len(self.shards) < share and work.free:
            return await self._take(share - len(self.shards))
        if len(self.shards) > share:
            resting_first = sorted(self.shards.values(), key=lambda shard: (shard in in_turn, shard.grant.shard))
            spare = resting_first[: len(self.shards) - share]
            for shard in spare:
                shard.leaving = shard in in_turn
            await self.give([shard for shard in spare if not shard.leaving])
        return False

    async def _take(self, limit: int) -> bool:
        sent = time.monotonic()
        name, lease = self._stream.name, self._stream.lease_seconds
        grants = await self._store.take(name, self._worker, limit, lease)
        for grant in grants:
            crash_rule = await self._crash_rule(grant)
            if grant.crashes:
                self._log.warning(
                    "stream '%s': took over shard %d from a worker that died (%d in a row)",
                    name,
                    grant.shard,
                    grant.crashes,
                    extra={"action": "took_over", "stream": name, "shard": grant.shard},
                )
            self.shards[grant.shard] = Shard(grant, self._batch, crash_rule, sent + lease * 2 / 3)
        return bool(grants)

    async def _crash_rule(self, grant: Grant) -> CrashRule:
        if not CrashRule.has_evidence(grant):
            return CrashRule.after_crash(grant, None)
        try:
            found = () if grant.suspect is None else await self._store.find_by_id(grant.suspect)
            status = next((each.event.status for each in found if each.event.stream == grant.stream), None)
            rule = CrashRule.after_crash(grant, status)
            if rule.crashes < grant.crashes:
                await self._store.set_crashes(grant, rule.crashes)
            else:
                # Clear it: a suspect that the next owner finds must be one that this owner noted.
                await self._store.note_suspect(grant, None)
        except (StoreDown, LeaseLost):
            # The next turn finds out if the shard is not ours. The suspect counts as not settled.
            return CrashRule.after_crash(grant, Status.PENDING)
        return rule

    async def renew(self) -> None:
        """Extend every lease, and forget the shards that are lost."""
        grants = [shard.grant for shard in self.shards.values()]
        sent = time.monotonic()
        held = set(await self._store.renew(grants, self._stream.lease_seconds))
        for grant in grants:
            shard = self.shards.get(grant.shard)
            if shard is None or shard.grant != grant:
                continue
            if grant in held:
                shard.publish_until = sent + self._stream.lease_seconds * 2 / 3
            else:
                self.drop(shard)

    def drop(self, shard: Shard) -> None:
        """Forget a shard that another worker owns now."""
        if self.owns(shard):
            del self.shards[shard.grant.shard]
            self._log.warning(
                "stream '%s': lost shard %d to another worker",
                self._stream.name,
                shard.grant.shard,
                extra={"action": "lease_lost", "stream": self._stream.name, "shard": shard.grant.shard},
            )

    async def give(self, shards: Iterable[Shard]) -> None:
        grants = []
        for shard in shards:
            self.shards.pop(shard.grant.shard, None)
            grants.append(shard.grant)
        if grants:
            await self._store.give(grants)
