"""The shards of an ordered stream that a worker owns: a fair share, renewed in time, given away between turns."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from pillarbox.errors import LeaseLost, StoreDown
from pillarbox.event import Status
from pillarbox.publisher import Place
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
    full: bool = False  # its last turn read as much as it may: the next one, which follows at once, is its own
    check_due_at: float = 0.0  # when to ask again for a held key that is due
    # Where the destination keeps the progress: the shard as it knows it, the last batch that is settled, and whether
    # nothing was published since then.
    place: Place | None = None
    settled_batch: UUID | None = None
    recovered: bool = False

    @property
    def limit(self) -> int:
        """The most events that a turn reads."""
        return self.crash_rule.limit(self.batch.size)

    @property
    def quiet(self) -> bool:
        """Whether it can share a turn. After a crash it cannot: a second crash must have one cause."""
        return not (self.full or self.crash_rule.cautious)

    def may_be_due(self, now: float) -> bool:
        """Whether it is time to ask for held keys."""
        return now >= self.check_due_at or not self.asked


class Ownership:
    """The shards of one stream that this worker owns."""

    def __init__(self, job: Assignment) -> None:
        self.shards: dict[int, Shard] = {}
        self._store = job.store
        self._stream = job.stream
        self._worker = job.worker
        self._publisher = job.publisher
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
        self._log_take_over(grants)
        for grant, crash_rule in zip(grants, await self._crash_rules(grants), strict=True):
            self.shards[grant.shard] = Shard(grant, self._batch, crash_rule, sent + lease * 2 / 3)
        return bool(grants)

    def _log_take_over(self, grants: Iterable[Grant]) -> None:
        """One line for each worker that died. A lease of our own that ran out is no death."""
        dead = Counter(grant.previous for grant in grants if grant.previous not in (None, self._worker))
        for worker, count in dead.items():
            self._log.warning(
                "stream '%s': took over %d %s from worker %s, which died or hung: its lease ran out",
                self._stream.name,
                count,
                "shard" if count == 1 else "shards",
                worker,
                extra={"action": "took_over", "stream": self._stream.name, "worker": worker, "shards": count},
            )

    async def _crash_rules(self, grants: Sequence[Grant]) -> Sequence[CrashRule]:
        """The rules of shards that were taken together, and the notes that their crashes leave in the store."""
        try:
            statuses = {grant.shard: await self._suspect_status(grant) for grant in grants}
        except StoreDown:
            # Without the old suspects the next turns note new ones.
            return [CrashRule(grant.crashes) for grant in grants]
        explained = {grant.previous for grant in grants if CrashRule.may_be_dead_of(grant, statuses[grant.shard])}
        return [await self._crash_rule(grant, statuses[grant.shard], grant.previous in explained) for grant in grants]

    async def _suspect_status(self, grant: Grant) -> Status | None:
        if grant.suspect is None or grant.previous is None:
            return None
        found = await self._store.find_by_id(grant.suspect)
        return next((each.event.status for each in found if each.event.stream == grant.stream), None)

    async def _crash_rule(self, grant: Grant, status: Status | None, explained: bool) -> CrashRule:
        if grant.previous is None:
            return CrashRule(grant.crashes)
        try:
            if grant.previous == self._worker:
                # It lost the database for longer than its lease, and is alive.
                await self._store.set_crashes(grant, grant.crashes - 1)
                return CrashRule(grant.crashes - 1)
            rule = CrashRule.after_crash(grant, status, explained=explained)
            if rule.crashes < grant.crashes:
                await self._store.set_crashes(grant, rule.crashes)
            else:
                # A suspect that the next owner finds must be one that this owner noted.
                await self._store.note_suspect(grant, rule.suspect, rule.waiting_note)
        except (StoreDown, LeaseLost):
            # The next turn finds out if the shard is not ours. Else it notes another suspect.
            return CrashRule(grant.crashes)
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
            self._release(shard)
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
            self._release(shard)
            grants.append(shard.grant)
        if grants:
            await self._store.give(grants)

    def _release(self, shard: Shard) -> None:
        if shard.place is not None:
            self._publisher.leave(shard.place)
