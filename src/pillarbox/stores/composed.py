"""A store put together from parts."""

from collections.abc import Callable
from typing import Protocol

from pillarbox.store import (
    Claims,
    Consumers,
    Examined,
    Gauges,
    Insights,
    Operator,
    Retention,
    Schema,
    Serving,
    Turns,
    Writing,
)
from pillarbox.stores.outbox_info import OutboxInfo


class Openable(Protocol):
    """The database of a store."""

    async def open(self) -> None:
        """Safe to call twice."""

    async def close(self) -> None: ...


class CheckedSchema(Schema, Protocol):
    """A schema whose version is checked when a store is opened."""

    async def check(self) -> None:
        """Refuse an outbox of another release, and learn its number of shards."""


class ComposedStore:
    """Passes each contract on to its part.

    A part gets all that it needs when it is made, and calls no other part. A subclass adds ``features``.
    """

    def __init__(
        self,
        database: Openable,
        outbox: OutboxInfo,
        *,
        serving: Serving,
        turns: Turns,
        claims: Claims,
        consumers: Consumers,
        retention: Retention,
        operator: Operator,
        insights: Insights,
        gauges: Gauges,
        examined: Examined,
        writing: Writing,
        schema: CheckedSchema,
    ) -> None:
        self.announce, self.join, self.leave = serving.announce, serving.join, serving.leave
        self.poll, self.reenter_due, self.doze = serving.poll, serving.reenter_due, serving.doze
        self.take, self.renew, self.give = turns.take, turns.renew, turns.give
        self.read, self.read_due, self.settle = turns.read, turns.read_due, turns.settle
        self.settle_ticket, self.settled_batch = turns.settle_ticket, turns.settled_batch
        self.held_keys, self.note_suspect, self.set_crashes = turns.held_keys, turns.note_suspect, turns.set_crashes
        self.claim, self.renew_claims = claims.claim, claims.renew_claims
        self.settle_claims, self.rescue = claims.settle_claims, claims.rescue
        self.bury, self.take_replays = consumers.bury, consumers.take_replays
        self.finish_replay, self.report = consumers.finish_replay, consumers.report
        self.leave_consumer, self.consumers = consumers.leave_consumer, consumers.consumers
        self.dead_count, self.dead_consumers = consumers.dead_count, consumers.dead_consumers
        self.prune_published, self.prune_dead = retention.prune_published, retention.prune_dead
        self.prune_inbox, self.prune_idempotency = retention.prune_inbox, retention.prune_idempotency
        self.pause, self.resume = operator.pause, operator.resume
        self.replay, self.discard = operator.replay, operator.discard
        self.replay_published = operator.replay_published
        self.unserved, self.count = insights.unserved, insights.count
        self.gauges, self.stuck_keys, self.workers = gauges.gauges, gauges.stuck_keys, gauges.workers
        self.examine = examined.examine
        self.ahead, self.clock = gauges.ahead, gauges.clock
        self.find, self.find_dead, self.find_by_id = insights.find, insights.find_dead, insights.find_by_id
        self.dead_letters, self.audit = insights.dead_letters, insights.audit
        self.transaction, self.add = writing.transaction, writing.add
        self.migrate, self.script, self.remove = schema.migrate, schema.script, schema.remove
        self.identity, self.set_identity = schema.identity, schema.set_identity
        self.prefixes, self.server_version = schema.prefixes, schema.server_version
        self.outbox = outbox
        self._database, self._schema = database, schema
        self._opened = 0

    @property
    def description(self) -> str:
        return self.outbox.description

    @property
    def shards(self) -> int:
        return self.outbox.shards

    @property
    def newest_version(self) -> int:
        return self._schema.newest_version

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        await self._database.open()
        try:
            await self._schema.check()
        except BaseException:
            if not self._opened:
                await self._database.close()
            raise
        self._opened += 1

    async def close(self) -> None:
        self._opened = max(0, self._opened - 1)
        if not self._opened:
            await self._database.close()
