"""Tests of the contract: a store with a planted bug must fail it."""

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest

from pillarbox.batch import Part
from pillarbox.conformance import StoreContract
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import DuplicateEvent, ProgressError
from pillarbox.event import Event, Status
from pillarbox.ids import uuid7
from pillarbox.limits import check
from pillarbox.sql.rows import ADDED
from pillarbox.store import (
    Claim,
    ClaimResults,
    DeadLetter,
    Failure,
    Filter,
    Found,
    Grant,
    KeyRun,
    Page,
    Progress,
    Ref,
    Replay,
    Settlement,
    Store,
    Work,
)
from pillarbox.stores._tokens import new_token
from pillarbox.stores.identity import new_identity
from pillarbox.stores.sqlite import ROWS, SqliteStore

Held = Mapping[int, Collection[str]]

NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
FENCE = r" AND token = :token AND owner = :worker"
JOINT_FENCE = r" AND (l\.)?token IN \(SELECT value FROM json_each\(:tokens\)\) AND (l\.)?owner = :worker"
PAUSED = r" AND NOT EXISTS \(SELECT 1 FROM \{stream\} WHERE name = :stream AND paused\)"
OWNED = r"AND EXISTS \( ?SELECT 1 FROM \{lease\} WHERE [^)]*\)"


class Contract(StoreContract):
    concurrent_writers = False
    wait_seconds = 0.2

    async def set_schema_version(self, store: Store, version: int) -> None:
        await cast(Broken, store).probe.set_schema_version(version)

    async def damage(self, store: Store, event: Event, how: str) -> None:
        await cast(Broken, store).probe.damage(event, how)

    async def remember(self, store: Store, table: str, count: int) -> None:
        await cast(Broken, store).probe.remember(table, count)


TESTS = sorted(name for name in dir(Contract) if name.startswith("test_"))
# On SQLite no transaction stays open while others commit; and only chance decides who comes first in the last.
# SQLite has transactions, too.
NEED_MORE = {
    "test_a_late_commit_is_found",
    "test_every_event_is_published_once_and_in_order",
    "test_a_database_without_transactions_refuses_a_consumer",
}


class Broken:
    """A store whose methods and statements can be changed; all else is the store's own."""

    def __init__(self, path: str, *, shards: int) -> None:
        self.store = SqliteStore(path, shards=shards)
        self.probe = probe_of(self.store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def rewrite(self, rewrites: Mapping[str, Sequence[str]]) -> None:
        statements = self.probe.statements
        for name, pairs in rewrites.items():
            text = " ".join(statements.texts[name].split())
            for old, new in zip(pairs[::2], pairs[1::2], strict=True):
                text, found = re.subn(old, new, text)
                assert found, f"the statement {name} has no {old!r} any more: mend the mutant"
            statements.texts[name] = text
            statements[name] = statements.make(text)


class TicketsDeleteNothing(Broken):
    async def settle_ticket(self, grant: Grant, ticket: bytes, *, keep_published: bool = True) -> Progress:
        return await self.store.settle_ticket(grant, ticket)


class TicketsHideWhatIsGone(Broken):
    async def settle_ticket(self, grant: Grant, ticket: bytes, *, keep_published: bool = True) -> Progress:
        return (await self.store.settle_ticket(grant, ticket, keep_published=keep_published))._replace(gone=())


class TicketsAlwaysFit(Broken):
    async def settle_ticket(self, grant: Grant, ticket: bytes, *, keep_published: bool = True) -> Progress:
        try:
            return await self.store.settle_ticket(grant, ticket, keep_published=keep_published)
        except ProgressError:
            return Progress(None)


class SettlesWithoutATicket(Broken):
    async def settle_ticket(self, grant: Grant, ticket: bytes, *, keep_published: bool = True) -> Progress:
        found = await self.store.settle_ticket(grant, ticket, keep_published=keep_published)
        return found if ticket else Progress(uuid7())


class ForgetsTheBatch(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        held = await self.store.settle(settlements)
        if not any(each.ticket for each in settlements):
            await self.probe.execute("UPDATE {lease} SET settled_batch = NULL")
        return held


class NewIdentityEachTime(Broken):
    async def identity(self) -> str:
        return new_identity()


class TakesAnyIdentity(Broken):
    async def set_identity(self, identity: str) -> None:
        await self.store.set_identity("shop")


@dataclass(frozen=True)
class Mutant:
    """One planted bug, and the tests that must find it."""

    tests: Sequence[str]
    kind: type[Broken] = Broken
    rewrites: Mapping[str, Sequence[str]] | None = None


def bug(*tests: str, **rewrites: Sequence[str]) -> Mutant:
    """In each named statement, replace patterns."""
    return Mutant(tests, rewrites=rewrites)


class OpensAnything(Broken):
    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        await self.store.database.open(create=True)


class OpensOnce(Broken):
    is_open = False

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        assert not self.is_open
        await self.store.open()
        self.is_open = True


class ForgetsWorkersAtTheStart(Broken):
    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        await self.store.open()
        await self.probe.run("DELETE FROM outbox_worker")


class HasNoName(Broken):
    description = ""


class MigratesAgain(Broken):
    async def migrate(self, *, aggregate_index: bool = False) -> Sequence[str]:
        return await self.store.migrate(aggregate_index=aggregate_index) or ["0001_outbox.sql"]


class InsistsOnItsShards(Broken):
    def __init__(self, path: str, *, shards: int) -> None:
        super().__init__(path, shards=shards)
        self.wanted = shards

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        await self.store.open()
        self.store.outbox.shards = self.wanted


class CommitsEarly(Broken):
    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        await self.store.add(list(events), tx)
        if tx is not None:
            await tx.run("COMMIT")
            await tx.run("BEGIN IMMEDIATE")


class CommitsWhatFailed(Broken):
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        failure = None
        async with self.store.transaction() as tx:
            try:
                yield tx
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure


class LeavesATransactionOpen(Broken):
    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        try:
            await self.store.add(list(events), tx)
        except asyncio.CancelledError:
            await self.probe.run("BEGIN")
            raise


class AddsTheFirstOnly(Broken):
    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        await self.store.add(list(events[:1]), tx)


class NeedsAnEvent(Broken):
    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        await self.store.add([events[0], *events[1:]], tx)


class Changes(Broken):
    """Writes events other than they are."""

    def change(self, event: Event) -> Event:
        raise NotImplementedError

    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        await self.store.add([self.change(event) for event in events], tx)


class SerialisesAgain(Changes):
    def change(self, event: Event) -> Event:
        try:
            return event._replace(payload=json.dumps(json.loads(event.payload)).encode())
        except ValueError:
            return event


class DropsTheRoutingKey(Changes):
    def change(self, event: Event) -> Event:
        return event._replace(routing_key=None)


class WritesAscii(Changes):
    def change(self, event: Event) -> Event:
        return event._replace(tenant=event.tenant.encode("ascii", "replace").decode())


class IgnoresTheSchedule(Changes):
    def change(self, event: Event) -> Event:
        return event._replace(available_at=None)


class WritesBackwards(Broken):
    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        await self.store.add(list(events)[::-1], tx)


class GivesASeqAgain(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        held = await self.store.settle(settlements)
        await self.probe.run("DELETE FROM sqlite_sequence")
        return held


class TakesInTwoSteps(Broken):
    async def take(self, stream: str, worker: str, limit: int, seconds: float) -> Sequence[Grant]:
        db, sql = self.store.database, self.store.statements
        shards = [row[0] for row in await db.fetch(sql["takeable"], stream=stream, limit=limit)]
        own = {"worker": worker, "token": new_token(), "seconds": seconds}
        await db.execute(sql["take"], stream=stream, shards=shards, **own)
        rows = await db.fetch(sql["taken"], stream=stream, shards=shards)
        return [Grant(stream, row[0], worker, row[1]) for row in rows]


class ClaimsInTwoSteps(Broken):
    async def claim(self, stream: str, shard: int | None, worker: str, limit: int, seconds: float) -> Sequence[Claim]:
        db, sql = self.store.database, self.store.statements
        ids = [row[0] for row in await db.fetch(sql["ready"], stream=stream, shard=shard, limit=limit)]
        own = {"worker": worker, "token": new_token(), "seconds": seconds}
        await db.execute(sql["claim"], stream=stream, ids=ids, **own)
        rows = await db.fetch(sql["claimed"], stream=stream, ids=ids)
        return [Claim(ROWS.event(row, stream, Status.PROCESSING), row[ADDED]) for row in rows]


class RenewsInWordsOnly(Broken):
    async def renew(self, grants: Sequence[Grant], seconds: float) -> Collection[Grant]:
        await self.store.renew(grants, seconds)
        return grants


class Misreports(Broken):
    """Answers polls with something else."""

    lie: Mapping[str, Any]

    async def poll(self, stream: str, worker: str, grants: Sequence[Grant] | None) -> Work:
        return replace(await self.store.poll(stream, worker, grants), **self.lie)


def misreports(test: str, **lie: Any) -> Mutant:
    return Mutant([test], type("Misreport", (Misreports,), {"lie": lie}))


class ReadsBehindTheLastSeen(Broken):
    def __init__(self, path: str, *, shards: int) -> None:
        super().__init__(path, shards=shards)
        self.seen: dict[int | None, int] = {}

    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        parts = []
        for part in await self.store.read(grants, limit, max_bytes):
            last = self.seen.get(part.shard, 0)
            events = [event for event in part.events if event.seq > last]
            self.seen[part.shard] = max([last, *(event.seq for event in events)])
            parts.append(part._replace(events=events))
        return parts


class SkipsWhatIsLarge(Broken):
    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        parts = await self.store.read(grants, limit, max_bytes)
        return [
            part._replace(events=[event for event in part.events if len(event.payload) <= max_bytes]) for part in parts
        ]


class ReadsTooMuch(Broken):
    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        return await self.store.read(grants, limit, 1_000_000_000)


class ReadsOneShard(Broken):
    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        return await self.store.read(grants[:1], limit, max_bytes)


class LimitsEachShard(Broken):
    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        return [part for grant in grants for part in await self.store.read([grant], limit, max_bytes)]


class ReadsSomething(Broken):
    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        return await self.store.read(grants, limit, max_bytes) or [Part(0, 0, ())]


class ReadsAKeyBackwards(Broken):
    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        run = await self.store.read_due(grant, limit, max_bytes)
        return run and run._replace(events=run.events[::-1])


class IgnoresFilters(Broken):
    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        return await self.store.find(replace(where, tenant=None), limit, newest_first)


class IgnoresInstants(Broken):
    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        return await self.store.find(replace(where, until=None), limit, newest_first)

    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        return await self.store.find_dead(replace(where, until=None), limit, after)


class IgnoresTheTopic(Broken):
    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        return await self.store.find(replace(where, topic=None), limit, newest_first)


class NewestFirstAlways(Broken):
    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        return await self.store.find(where, limit)


class ListsPayloads(Broken):
    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        found = await self.store.find_dead(where, limit, after)
        return [whole for each in found for whole in await self.find_by_id(each.event.id)]


class SeesOtherwise(Broken):
    """Shows an event with something left out."""

    left_out: Mapping[str, Any]

    async def find_by_id(self, id: UUID) -> Sequence[Found]:
        return [each._replace(**self.left_out) for each in await self.store.find_by_id(id)]


def hides(test: str, **left_out: Any) -> Mutant:
    return Mutant([test], type("Hides", (SeesOtherwise,), {"left_out": left_out}))


class FindsTheFirstStream(Broken):
    async def find_by_id(self, id: UUID) -> Sequence[Found]:
        return (await self.store.find_by_id(id))[:1]


class FindsTheDeadByDeath(Broken):
    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        return list(reversed(await self.store.find_dead(where, limit, after)))


class NoLetterHoldsItsKey(Broken):
    async def find_dead(self, where: Filter, limit: int, after: int = 0) -> Sequence[Found]:
        return [each._replace(holds_key=False) for each in await self.store.find_dead(where, limit, after)]


class HidesAnEmptyKey(Broken):
    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        run = await self.store.read_due(grant, limit, max_bytes)
        return run if run and run.events else None


class SettlesOtherwise(Broken):
    """Writes something else than it was told."""

    def change(self, settlement: Settlement) -> Settlement:
        raise NotImplementedError

    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        return await self.store.settle([self.change(settlement) for settlement in settlements])


class SetsNothingAside(SettlesOtherwise):
    def change(self, settlement: Settlement) -> Settlement:
        return replace(settlement, hold_keys={})


class MangleErrors(SettlesOtherwise):
    def change(self, settlement: Settlement) -> Settlement:
        dead = [each._replace(error=each.error.encode("ascii", "replace").decode()) for each in settlement.dead]
        return replace(settlement, dead=dead)


class KeepsErrorsAsTheyAre(SettlesOtherwise):
    def change(self, settlement: Settlement) -> Settlement:
        for failure in (*settlement.failed, *settlement.dead):
            failure.error.encode()
        return settlement


class DiesOnce(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        known = {letter.event.id for letter in await self.dead_letters()}
        if any(failure.event.id in known for each in settlements for failure in each.dead):
            raise DuplicateEvent
        return await self.store.settle(settlements)


class NeedsSomethingToSettle(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        return await self.store.settle([settlement for settlement in settlements if settlement])


class HoldsBehindAFreeKey(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        held = await self.store.settle(settlements)
        for each in settlements:
            ids = [event.id for event in each.held]
            await self.store.database.execute(self.store.statements["hold"], stream=each.grant.stream, ids=ids)
        return held


class NamesEveryKey(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        await self.store.settle(settlements)
        return {
            each.grant.shard: {*each.hold_keys, *each.release_keys, *(str(event.key) for event in each.held)}
            for each in settlements
        }


class NamesLostShards(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        return {each.grant.shard: () for each in settlements} | dict(await self.store.settle(settlements))


class SettlesAllOrNothing(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        renewed = await self.store.renew([each.grant for each in settlements], 60.0)
        return await self.store.settle(settlements) if len(renewed) == len(settlements) else {}


class SettlesTheFirst(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        held = await self.store.settle(settlements[:1])
        return {each.grant.shard: held[settlements[0].grant.shard] for each in settlements}


class SettlesSomething(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        return await self.store.settle(settlements) or {0: ()}


class RemembersKeysItself(Broken):
    def __init__(self, path: str, *, shards: int) -> None:
        super().__init__(path, shards=shards)
        self.keys: dict[Grant, set[str]] = {}

    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        for each in settlements:
            self.keys.setdefault(each.grant, set()).update(each.hold_keys)
        return await self.store.settle(settlements)

    async def held_keys(self, grant: Grant) -> Collection[str]:
        return self.keys.get(grant, ())


class ReadsAllOrNothing(Broken):
    async def read(self, grants: Sequence[Grant], limit: int, max_bytes: int) -> Sequence[Part]:
        parts = await self.store.read(grants, limit, max_bytes)
        if any(part.unreadable for part in parts):
            raise ValueError("a row")
        return parts


class RunsWhatItCannotRead(Broken):
    async def read_due(self, grant: Grant, limit: int, max_bytes: int) -> KeyRun | None:
        run = await self.store.read_due(grant, limit, max_bytes)
        return run and run._replace(unreadable="")


class ClaimsWhatItCannotRead(Broken):
    async def claim(self, *arguments: Any) -> Sequence[Claim]:
        return [claim._replace(unreadable="") for claim in await self.store.claim(*arguments)]


class HidesWhatItCannotRead(Broken):
    async def find(self, where: Filter, limit: int, newest_first: bool = True) -> Sequence[Found]:
        return [found._replace(unreadable="") for found in await self.store.find(where, limit, newest_first)]


class CountsToTheEnd(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> Held:
        if any(event.attempts + 1 > 2**31 - 1 for each in settlements for event in each.published):
            raise OverflowError("attempts")
        return await self.store.settle(settlements)


class KeepsMilliseconds(Broken):
    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        rounded = [
            event._replace(
                occurred_at=event.occurred_at.replace(microsecond=event.occurred_at.microsecond // 1000 * 1000)
            )
            for event in events
        ]
        await self.store.add(rounded, tx)


class SettlesClaimsOfOthers(Broken):
    async def settle_claims(self, claims: Sequence[Claim], results: ClaimResults) -> int:
        mine = []
        for claim in claims:
            (seen,) = await self.store.find_by_id(claim.event.id)
            mine.append(claim._replace(token=seen.lease_token))
        return await self.store.settle_claims(mine, results)


class CountsNoRefusal(Broken):
    async def settle_claims(self, claims: Sequence[Claim], results: ClaimResults) -> int:
        await self.store.settle_claims(claims, results)
        return 0


class RefusesAll(Broken):
    async def settle_claims(self, claims: Sequence[Claim], results: ClaimResults) -> int:
        refused = await self.store.settle_claims(claims, ClaimResults())
        return refused or await self.store.settle_claims(claims, results)


class PrunesTheYoung(Broken):
    async def prune_published(self, keep_seconds: float, limit: int, after: Any = None) -> Page:
        return await self.store.prune_published(-1, limit, after)


class PrunesOnePage(Broken):
    async def prune_published(self, keep_seconds: float, limit: int, after: Any = None) -> Page:
        return (await self.store.prune_published(keep_seconds, limit, after))._replace(after=None)


class SeesOnlyPending(Broken):
    async def unserved(self) -> Sequence[str]:
        streams = await self.store.unserved()
        return [stream for stream in streams if Status.PENDING in await self.count(stream)]


class ListsEveryStream(Broken):
    async def dead_letters(self, stream: str | None = None, limit: int = 100) -> Sequence[DeadLetter]:
        return await self.store.dead_letters(None, limit)


class CountsWhatIsAsked(Broken):
    async def replay(self, refs: Sequence[Ref], by: str) -> int:
        await self.store.replay(refs, by)
        return len(refs)


class ReplaysPublishedAsAsked(Broken):
    async def replay_published(self, refs: Sequence[Ref], by: str) -> int:
        return sum([await self.store.replay_published([ref], by) for ref in refs])


class ListsFromTheStart(Broken):
    async def find(
        self, where: Filter, limit: int, newest_first: bool = True, after: UUID | None = None
    ) -> Sequence[Found]:
        return await self.store.find(where, limit, newest_first)


class ReplaysAsAsked(Broken):
    async def replay(self, refs: Sequence[Ref], by: str) -> int:
        return sum([await self.store.replay([ref], by) for ref in refs])


class ForgetsTheStream(Broken):
    """Acts on an id in every stream."""

    async def replay(self, refs: Sequence[Ref], by: str) -> int:
        everywhere = [each.event for ref in refs for each in await self.store.find_by_id(ref.id)]
        return await self.store.replay([Ref(event.id, event.stream) for event in everywhere], by)


class BuriesWithoutAnInboxRow(Broken):
    async def bury(self, consumer: str, failure: Failure, earlier: Sequence[Mapping[str, Any]] = ()) -> bool:
        is_new = await self.store.bury(consumer, failure, earlier)
        await self.probe.execute("DELETE FROM {inbox}")
        return is_new


class BuriesTheLastError(Broken):
    async def bury(self, consumer: str, failure: Failure, earlier: Sequence[Mapping[str, Any]] = ()) -> bool:
        return await self.store.bury(consumer, failure)


class BuriesWhatAWriterCouldAdd(Broken):
    async def bury(self, consumer: str, failure: Failure, earlier: Sequence[Mapping[str, Any]] = ()) -> bool:
        check(failure.event)
        return await self.store.bury(consumer, failure, earlier)


class FinishesWithoutAnInboxRow(Broken):
    async def finish_replay(self, consumer: str, replay: Replay) -> bool:
        is_finished = await self.store.finish_replay(consumer, replay)
        await self.probe.execute("DELETE FROM {inbox}")
        return is_finished


class DiscardsTheInboxRow(Broken):
    async def discard(self, refs: Sequence[Ref], by: str) -> int:
        count = await self.store.discard(refs, by)
        await self.probe.execute("DELETE FROM {inbox}")
        return count


class ReentersAtOnce(Broken):
    async def reenter_due(self, stream: str, limit: int) -> int:
        return await self.store.reenter_due(stream, 1000)


class RefusesTheSecondStream(Broken):
    async def add(self, events: Sequence[Event], tx: Any = None) -> None:
        if len({event.id for event in events}) < len(events):
            raise DuplicateEvent
        await self.store.add(events, tx)


MUTANTS: Mapping[str, Mutant] = {
    # The schema, and writing.
    "opens without tables": Mutant(["test_missing_tables_name_the_remedy"], OpensAnything),
    "opens a newer schema": Mutant(["test_a_schema_of_a_newer_release_is_refused"], OpensAnything),
    "opens an older schema": Mutant(["test_a_schema_of_an_older_release_names_the_remedy"], OpensAnything),
    "opens once": Mutant(["test_opened_and_closed_twice"], OpensOnce),
    "forgets at the start": Mutant(["test_everything_is_there_after_a_restart"], ForgetsWorkersAtTheStart),
    "has no name": Mutant(["test_describes_itself"], HasNoName),
    "migrates again": Mutant(["test_migrating_again_changes_nothing", "test_two_migrations_at_once"], MigratesAgain),
    "insists on its shards": Mutant(["test_the_number_of_shards_belongs_to_the_outbox"], InsistsOnItsShards),
    "a rollback leaves the event": Mutant(
        ["test_a_rolled_back_transaction_leaves_nothing", "test_a_duplicate_takes_its_transaction_with_it"],
        CommitsWhatFailed,
    ),
    "commits early": Mutant(["test_an_event_is_invisible_until_the_commit"], CommitsEarly),
    "leaves a transaction open": Mutant(["test_a_cancelled_write_leaves_the_store_usable"], LeavesATransactionOpen),
    "adds the first only": Mutant(["test_a_committed_transaction_leaves_all_of_it"], AddsTheFirstOnly),
    "needs an event": Mutant(["test_writing_nothing"], NeedsAnEvent),
    "serialises again": Mutant(["test_the_payload_comes_back_byte_for_byte"], SerialisesAgain),
    "drops a field": Mutant(["test_every_field_comes_back"], DropsTheRoutingKey),
    "writes ascii": Mutant(["test_text_comes_back_as_it_was"], WritesAscii),
    "writes backwards": Mutant(["test_seq_follows_the_order_of_writing"], WritesBackwards),
    "gives a seq again": Mutant(["test_a_seq_is_never_given_again"], GivesASeqAgain),
    "replaces a duplicate": bug(
        "test_an_id_is_written_once",
        "test_an_id_that_is_published_is_still_taken",
        add=["INSERT INTO", "INSERT OR REPLACE INTO"],
    ),
    # Ownership.
    "takes what others own": bug(
        "test_two_workers_never_share_a_shard",
        "test_a_lease_that_runs_is_not_taken_over",
        takeable=[r"\(owner IS NULL OR .*\) ORDER", "1 ORDER"],
    ),
    "takes in two steps": Mutant(["test_workers_that_take_at_once_never_share_a_shard"], TakesInTwoSteps),
    "never takes over": bug(
        "test_an_expired_lease_is_taken_over_and_counted",
        takeable=[r"\(owner IS NULL OR .*\) ORDER", "owner IS NULL ORDER"],
    ),
    "the token stays": bug(
        "test_an_expired_lease_is_taken_over_and_counted",
        "test_a_shard_that_was_given_back_is_taken_cleanly",
        take=[r"token = :token \+ shard", "token = token"],
    ),
    "counts tokens": bug(
        "test_no_token_of_a_lease_is_granted_twice", take=[r"token = :token \+ shard", "token = token + 1"]
    ),
    "counts tokens of claims": bug(
        "test_no_token_of_a_claim_is_granted_twice", claim=["lease_token = :token", "lease_token = lease_token + 1"]
    ),
    "counts no crash": bug(
        "test_an_expired_lease_is_taken_over_and_counted", take=[r"crashes \+ CASE .* END", "crashes"]
    ),
    "counts what was no crash": bug("test_a_shard_that_was_given_back_is_taken_cleanly", take=["CASE .* END", "1"]),
    "takes too many": bug("test_no_more_is_taken_than_the_limit", takeable=[":limit", "1000"]),
    "takes in every stream": bug("test_streams_are_owned_apart", take=["WHERE stream = :stream AND", "WHERE"]),
    "renews in words": Mutant(["test_renewing_answers_what_is_still_held"], RenewsInWordsOnly),
    "renews nothing": bug(
        "test_renewing_keeps_a_lease_from_running_out",
        renew_all=["lease_until = .* WHERE", "lease_until = lease_until WHERE"],
    ),
    "renews without token": bug("test_a_stale_renewal_prolongs_nothing", renew=[FENCE, ""]),
    "renews all without tokens": bug("test_a_stale_renewal_prolongs_nothing", renew_all=[JOINT_FENCE, ""]),
    "gives without token": bug("test_a_stale_owner_gives_nothing_back", give=[FENCE, ""]),
    "loses the suspect": bug("test_the_next_owner_learns_of_the_suspect", taken=["suspect", "NULL"]),
    "keeps the suspect": bug("test_a_clean_end_clears_the_suspect", give=[", suspect = NULL", ""]),
    "keeps the count of its suspect": bug("test_a_clean_end_clears_the_suspect", give=[", alone = 0", ""]),
    "forgets that a suspect was alone": bug("test_the_next_owner_learns_of_the_suspect", taken=[", alone", ", 0"]),
    "names no worker that died": bug(
        "test_an_expired_lease_is_taken_over_and_counted", takeable=["shard, owner", "shard, NULL"]
    ),
    "suspects for ever": bug(
        "test_an_event_that_ended_is_no_longer_suspected",
        note_suspect=["suspect = :suspect", "suspect = COALESCE(:suspect, suspect)"],
    ),
    "keeps the count": bug("test_a_clean_stretch_clears_suspect_and_count", set_crashes=[", crashes = :crashes", ""]),
    "suspects without token": bug(
        "test_a_stale_owner_suspects_nobody", note_suspect=[FENCE, ""], set_crashes=[FENCE, ""]
    ),
    "polls wrong workers": misreports("test_a_poll_counts_the_live_workers", live=3),
    "polls a wrong rank": misreports("test_a_poll_counts_the_live_workers", rank=0),
    "polls no free shard": misreports("test_a_poll_counts_the_free_shards", free=0),
    "polls every shard": misreports("test_a_poll_names_the_shards_with_pending_events", ready=frozenset(range(4))),
    "polls no due shard": misreports("test_a_poll_names_the_shards_with_due_keys", due=frozenset()),
    "polls nothing scheduled": misreports("test_a_poll_says_when_something_is_to_be_promoted", scheduled=False),
    "polls no pause": misreports("test_pausing_is_seen_by_the_next_poll", paused=False),
    # Turns.
    "reads without token": bug("test_a_stale_owner_reads_nothing", read=[OWNED, ""]),
    "reads by id": bug("test_the_order_is_that_of_seq", read=["ORDER BY seq", "ORDER BY id"]),
    "reads by instant": bug("test_the_order_is_that_of_seq", read=["ORDER BY seq", "ORDER BY occurred_at"]),
    "reads too many": bug("test_no_more_is_read_than_the_limit", read=[":limit", "1000"]),
    "reads too much": Mutant(
        ["test_no_more_bytes_are_read_than_the_limit", "test_an_empty_event_makes_no_room_for_a_large_one"],
        ReadsTooMuch,
    ),
    "skips what is large": Mutant(["test_one_event_is_read_whatever_its_size"], SkipsWhatIsLarge),
    "reads every shard": bug(
        "test_only_what_is_pending_in_the_shard_is_read", read=["AND shard = :shard AND status", "AND status"]
    ),
    "reads behind the last seen": Mutant(
        ["test_what_is_not_settled_is_read_again", "test_a_replayed_event_is_pending_again"],
        ReadsBehindTheLastSeen,
    ),
    "publishes nothing": bug(
        "test_what_is_published_is_not_read_again", publish=["status = 'published'", "status = status"]
    ),
    "keeps what it should delete": bug(
        "test_what_need_not_be_kept_is_deleted",
        remove=["DELETE FROM {event} WHERE", "UPDATE {event} SET status = 'published' WHERE"],
    ),
    "settles without token": bug("test_a_stale_owner_settles_nothing", fence=[FENCE, ""]),
    "settles what it gave back": bug(
        "test_whoever_gave_a_shard_back_settles_nothing", fence_joint=[" AND owner = :worker", ""]
    ),
    "settles by the clock": bug(
        "test_an_expired_lease_that_nobody_took_still_settles",
        fence=["AND owner = :worker", f"AND owner = :worker AND lease_until > {NOW}"],
        fence_joint=["AND owner = :worker", f"AND owner = :worker AND lease_until > {NOW}"],
    ),
    "charges a repeated settle": bug(
        "test_a_settle_that_is_repeated_changes_nothing_more",
        fail=["'failed', attempts = :attempts", "'failed', attempts = attempts + 1"],
    ),
    "fails what is published": bug(
        "test_what_is_published_stays_so_whatever_a_late_settle_says", fail=["AND status IN .*$", ""]
    ),
    "needs something to settle": Mutant(["test_nothing_to_settle"], NeedsSomethingToSettle),
    "sets nothing aside": Mutant(["test_the_key_of_a_failed_event_is_held"], SetsNothingAside),
    "holds nothing": bug("test_what_follows_a_failed_event_is_held", hold=["status = 'held'", "status = status"]),
    "holds behind a free key": Mutant(["test_nothing_is_held_behind_a_key_that_is_free"], HoldsBehindAFreeKey),
    "buries without a letter": bug(
        "test_a_dead_event_is_a_dead_letter",
        "test_a_claim_that_dies_is_a_dead_letter",
        move_to_dead=["WHERE id = :id", "WHERE 0 AND id = :id"],
    ),
    "forgets the errors": bug(
        "test_a_dead_letter_has_the_history_of_its_errors", move_to_dead=["CASE WHEN .* END", ":line"]
    ),
    "keeps errors as they are": Mutant(["test_an_error_that_no_database_can_keep_stops_nothing"], KeepsErrorsAsTheyAre),
    "mangles errors": Mutant(["test_an_error_may_contain_any_text"], MangleErrors),
    "holds in a parked key": bug(
        "test_what_follows_in_a_parked_key_dies_too", lock_keys=["SELECT key, mode", "SELECT key, 'blocked'"]
    ),
    "parks a key that was freed": bug(
        "test_a_turn_that_read_a_parked_key_does_not_park_it_again",
        lock_keys=["SELECT key, mode", "SELECT key, 'parked'"],
    ),
    "dies once": Mutant(["test_an_id_that_died_may_die_again"], DiesOnce),
    "names every key": Mutant(["test_a_settle_names_the_held_keys"], NamesEveryKey),
    # Held keys, and instants.
    "mixes the shards of keys": bug("test_held_keys_belong_to_their_shard", held_keys=[" AND h.shard = :shard", ""]),
    "reads a key backwards": Mutant(["test_a_due_key_is_read_from_its_head_on"], ReadsAKeyBackwards),
    "reads too much of a key": bug("test_a_due_key_is_read_within_the_limits", read_key=[":limit", "1000"]),
    "reads a key without token": bug("test_a_stale_owner_reads_no_due_key", read_key=[OWNED, ""]),
    "reads a key early": bug(
        "test_a_key_is_not_due_before_its_time", due_key=["AND next_attempt_at <= .* ORDER", "ORDER"]
    ),
    "starves a key": bug("test_every_due_key_has_its_turn", due_key=["LIMIT 1", "LIMIT 1 OFFSET 1"]),
    "sees the first key only": bug(
        "test_a_key_with_a_future_attempt_does_not_hide_a_due_one",
        due_key=[
            "WHERE (.*) AND next_attempt_at <= (.*) ORDER BY .*$",
            r"WHERE rowid = (SELECT min(rowid) FROM {held_key} WHERE \1) AND next_attempt_at <= \2",
        ],
    ),
    "releases nothing": bug("test_a_key_is_released_when_nothing_of_it_waits", release_key=["mode = 'retrying'", "0"]),
    "releases what is held": bug(
        "test_a_key_stays_held_while_something_of_it_waits", release_key=["'failed', 'held'", "'failed'"]
    ),
    "releases what is failed": bug(
        "test_a_key_stays_held_while_its_head_is_failed", release_key=["'failed', 'held'", "'held'"]
    ),
    "releases a blocked key": bug(
        "test_only_an_operator_frees_a_key_that_is_blocked_or_parked", release_key=["AND mode = 'retrying' ", ""]
    ),
    "remembers keys itself": Mutant(["test_a_held_key_is_inherited"], RemembersKeysItself),
    "promotes no failed event": bug(
        "test_a_failed_event_without_a_key_comes_back_by_itself", due=["'scheduled', 'failed'", "'scheduled'"]
    ),
    "promotes behind the key's back": bug(
        "test_a_failed_event_with_a_key_comes_back_by_its_key_only",
        "test_a_promoted_event_that_fails_waits_for_its_key",
        fail=["next_attempt_at = .*?, last_error", f"next_attempt_at = {NOW}, last_error"],
    ),
    "ignores the schedule": Mutant(
        ["test_a_scheduled_event_waits", "test_only_what_is_ready_is_claimed"], IgnoresTheSchedule
    ),
    "promotes no scheduled event": bug(
        "test_a_scheduled_event_comes_when_its_instant_has_come", due=["'scheduled', 'failed'", "'failed'"]
    ),
    # Queue streams.
    "claims without marking": bug(
        "test_a_claim_is_charged_and_exclusive", claim=["status = 'processing'", "status = status"]
    ),
    "claims in two steps": Mutant(["test_two_claimers_never_share_an_event"], ClaimsInTwoSteps),
    "forgets the instant of a claim": bug(
        "test_a_claimed_event_has_the_instant_that_it_waited_for",
        claimed=["available_at, lease_token", "NULL, lease_token"],
    ),
    "publishes no claim": bug(
        "test_a_claim_that_is_published_is_through", publish_claims=["status = 'published'", "status = status"]
    ),
    "ignores a claim's delay": bug(
        "test_a_claim_that_fails_comes_back_after_its_delay",
        fail=["next_attempt_at = .*?, last_error", f"next_attempt_at = {NOW}, last_error"],
    ),
    "charges a refund": bug(
        "test_a_refund_gives_the_attempt_back",
        "test_a_refunded_suspect_is_charged_only_for_a_crash_while_alone",
        refund=["attempts = attempts - 1", "attempts = attempts"],
    ),
    "settles claims without token": Mutant(
        ["test_a_stale_claim_settles_nothing_and_is_counted"], SettlesClaimsOfOthers
    ),
    "counts no refusal": Mutant(
        ["test_a_stale_claim_settles_nothing_and_is_counted", "test_a_queue_is_worked_off_whatever_crashes"],
        CountsNoRefusal,
    ),
    "settles a claim again": bug(
        "test_a_settled_claim_is_not_settled_again", lock_claims=["AND status = 'processing'", ""]
    ),
    "refuses all for one": Mutant(["test_a_stale_claim_does_not_hinder_the_others"], RefusesAll),
    "a claim's token stays": bug(
        "test_a_token_stays_stale_after_death_and_replay", claim=["lease_token = :token", "lease_token = 1"]
    ),
    "renews claims without token": bug(
        "test_renewing_claims_answers_what_is_still_held", renew_claim=[" AND lease_token = :token", ""]
    ),
    "rescues from the living": bug(
        "test_what_a_living_worker_holds_is_left_alone", stuck=[r"\(lease_until < .*\) ORDER", "1 ORDER"]
    ),
    "suspects nothing": bug(
        "test_what_a_dead_worker_held_is_suspect_and_uncharged", fail=["suspect = :suspect", "suspect = 0"]
    ),
    "kills after any crash": bug("test_what_a_dead_worker_held_is_suspect_and_uncharged", stuck=["suspect", "3"]),
    "counts no crash alone": bug(
        "test_three_crashes_while_alone_kill_an_event_and_charge_nothing", stuck=["suspect", "0"]
    ),
    "claims suspects together": bug("test_suspects_are_claimed_one_at_a_time", suspects=["LIMIT 1", "LIMIT 9"]),
    "waits for what hangs": bug(
        "test_what_is_held_for_too_long_is_taken_though_renewed",
        stuck=[r" OR processing_started_at < .*\) ORDER", ") ORDER"],
    ),
    "a rescue takes nothing away": bug(
        "test_what_was_rescued_is_not_settled_by_its_old_worker",
        fail=["status = 'failed', attempts", "status = 'processing', attempts", "THEN 0 ELSE", "THEN lease_token ELSE"],
    ),
    "a suspect for ever": bug(
        "test_a_suspect_that_succeeds_is_through",
        claim=["next_attempt_at = NULL, ", ""],
        publish_claims=[", suspect = 0", ""],
    ),
    "a suspect after a failure": bug(
        "test_a_suspect_that_fails_is_a_suspect_no_more", fail=[" suspect = :suspect,", ""]
    ),
    # Rows written past the outbox.
    "reads all or nothing": Mutant(["test_a_part_ends_before_an_event_that_cannot_be_read"], ReadsAllOrNothing),
    "runs what it cannot read": Mutant(
        ["test_a_held_event_that_cannot_be_read_is_alone_in_its_run"], RunsWhatItCannotRead
    ),
    "claims what it cannot read": Mutant(
        ["test_a_claim_that_cannot_be_read_says_so_beside_healthy_ones"], ClaimsWhatItCannotRead
    ),
    "hides what it cannot read": Mutant(
        ["test_an_operator_sees_what_can_be_read_and_what_cannot"], HidesWhatItCannotRead
    ),
    "counts to the end": Mutant(["test_the_largest_number_of_attempts_hinders_no_settle"], CountsToTheEnd),
    "keeps milliseconds": Mutant(["test_an_instant_keeps_its_microseconds_and_its_zone"], KeepsMilliseconds),
    "knows no year before 1970": bug(
        "test_an_instant_of_long_ago_has_come",
        due=["AND status IN", "AND next_attempt_at > '1970-01-01 00:00:00.000' AND status IN"],
    ),
    # Retention, steering, operators.
    "prunes whatever its state": bug(
        "test_only_what_is_published_is_pruned",
        prune_page=["status = 'published' AND published_at", "created_at"],
        prune=["status = 'published' AND published_at", "created_at"],
    ),
    "prunes the young": Mutant(["test_what_is_young_is_kept"], PrunesTheYoung),
    "prunes one page": Mutant(["test_the_pages_of_a_prune_walk_everything"], PrunesOnePage),
    "prunes by id": bug(
        "test_a_published_event_is_pruned_whatever_its_id",
        prune_page=["WHERE seq > :after", "WHERE seq > :after AND id < '1'"],
    ),
    "prunes young letters": bug(
        "test_old_dead_letters_are_pruned", prune_dead=["WHERE died_at < .* AND NOT", "WHERE NOT"]
    ),
    "prunes letters of blocked keys": bug(
        "test_a_dead_letter_that_an_operator_needs_is_kept", prune_dead=["'blocked', 'parked'", "'parked'"]
    ),
    "forgets young events": bug(
        "test_old_rows_of_the_inbox_are_pruned", prune_inbox=["WHERE processed_at < .* ORDER", "ORDER"]
    ),
    "forgets one event of each consumer": bug(
        "test_old_rows_of_the_inbox_are_pruned", prune_inbox=["ORDER BY", "GROUP BY consumer ORDER BY"]
    ),
    "prunes no key without an answer": bug(
        "test_old_idempotency_keys_are_pruned_whatever_their_state",
        prune_idempotency=["WHERE created_at", "WHERE status IS NOT NULL AND created_at"],
    ),
    "prunes young keys": bug(
        "test_old_idempotency_keys_are_pruned_whatever_their_state",
        prune_idempotency=["WHERE created_at < .* ORDER", "ORDER"],
    ),
    "audits nobody": bug(
        "test_pausing_and_resuming_is_audited",
        "test_what_is_not_dead_is_neither_replayed_nor_discarded",
        audit=["VALUES .*$", "SELECT :operator, :action, :stream, :event_id, :consumer WHERE 0"],
    ),
    "names every stream": bug(
        "test_a_stream_that_nobody_serves_is_named", live_workers=["WHERE .* GROUP", "WHERE 0 GROUP"]
    ),
    "sees only what is pending": Mutant(["test_failed_and_scheduled_events_wait_for_a_worker_too"], SeesOnlyPending),
    "counts no dead": bug("test_events_are_counted_by_state", count_dead=[r"count\(", "0 * count("]),
    "lists every stream": Mutant(["test_dead_letters_are_listed_by_stream"], ListsEveryStream),
    "replays as published": bug("test_a_replayed_event_is_pending_again", reenter=["'pending'", "'published'"]),
    "forgets the errors of a replay": bug(
        "test_a_replayed_event_that_dies_again_keeps_its_history", revive=["errors FROM", "NULL FROM"]
    ),
    "counts what is asked": Mutant(["test_what_is_not_dead_is_neither_replayed_nor_discarded"], CountsWhatIsAsked),
    "discards nothing": bug("test_a_discarded_event_is_gone_for_good", remove_dead=["WHERE", "WHERE 0 AND"]),
    "a replay forgets to make the key due": bug(
        "test_replaying_the_head_of_a_blocked_key_lets_it_go_on_in_order",
        "test_a_replay_makes_a_waiting_key_due_now",
        free_key=["next_attempt_at = .*?, dead_head", "next_attempt_at = next_attempt_at, dead_head"],
    ),
    "replays past the key": bug(
        "test_replaying_the_head_of_a_blocked_key_lets_it_go_on_in_order", revive=[":status", "'pending'"]
    ),
    "frees no key": bug(
        "test_discarding_the_head_of_a_blocked_key_lets_it_go_on",
        "test_a_parked_key_is_replayed_as_a_whole_in_order",
        free_key=["WHERE stream", "WHERE 0 AND stream"],
    ),
    "hides an empty key": Mutant(
        ["test_a_discarded_head_with_nothing_behind_leaves_a_key_to_release"], HidesAnEmptyKey
    ),
    "frees a parked key too early": bug(
        "test_a_parked_key_goes_on_when_its_head_is_decided", free_key=["dead_head = :id", "1"]
    ),
    "frees every key": bug(
        "test_acting_on_one_key_leaves_another_as_it_is", free_key=[r"AND key = :key AND \(.*\)", ""]
    ),
    # Cheap questions.
    "streams without their dead": bug(
        "test_every_stream_is_told_with_its_states",
        gauges=["FROM {dead_letter} (.*?) WHERE", r"FROM {dead_letter} \1 WHERE 0 AND"],
    ),
    "counts too few held keys": bug(
        "test_a_long_key_does_not_hide_that_others_fail",
        gauges=[r"LIMIT :limit\) GROUP BY mode", "LIMIT 1) GROUP BY mode"],
    ),
    "counts without end": bug("test_a_count_ends_at_the_limit", gauges=["LIMIT :limit", "LIMIT :limit + 1000"]),
    "counts workers that are gone": bug(
        "test_a_worker_that_is_gone_is_not_counted",
        workers=["seen_at, seen_until", "seen_at, '9999-12-31 00:00:00.000'"],
    ),
    "forgets the shards of the dead": bug(
        "test_a_worker_that_does_not_renew_is_named_until_its_shards_come_free", owners=["GROUP BY", "AND 0 GROUP BY"]
    ),
    "counts no parked keys": bug(
        "test_held_keys_are_counted_by_their_mode",
        gauges=["FROM {held_key} WHERE", "FROM {held_key} WHERE mode <> 'parked' AND"],
    ),
    "ages from the writing": bug(
        "test_only_what_waits_has_an_age", gauges=["available_at, created_at", "created_at, 0"]
    ),
    "only what is pending waits": bug(
        "test_a_failed_event_and_a_leased_one_wait_too", gauges=[r"count\(\*\), min\(since\)", "count(*), NULL"]
    ),
    "an open circuit starts again": bug(
        "test_a_worker_says_why_it_waits_for_its_destination",
        join=[r"coalesce\(w.circuit_at, excluded.circuit_at\)", "'9999-12-31 00:00:00.000'"],
    ),
    "a circuit stays open": bug(
        "test_a_worker_says_why_it_waits_for_its_destination",
        join=[
            "circuit_error = excluded.circuit_error",
            "circuit_error = coalesce(excluded.circuit_error, w.circuit_error)",
        ],
    ),
    "names the last event of a key": bug(
        "test_a_stuck_key_names_the_event_that_it_waits_for",
        held_key_events=["ORDER BY seq LIMIT 1", "ORDER BY seq DESC LIMIT 1"],
    ),
    "names no dead head": bug("test_a_stuck_key_names_the_event_that_it_waits_for", stuck_keys=["dead_head", "NULL"]),
    "counts what comes after": bug("test_what_comes_before_an_event_is_counted", before=["seq < :seq", "seq > 0"]),
    "counts before in other shards": bug("test_what_comes_before_an_event_is_counted", owner=["owner,", "'eve',"]),
    "has the hour of elsewhere": bug("test_the_clock_is_an_instant", clock=["'now'", "'now', '+5 hours'"]),
    "ignores a filter": Mutant(["test_events_are_found_by_what_they_are"], IgnoresFilters),
    "ignores an instant": Mutant(
        ["test_events_are_found_by_when_they_were_written", "test_a_dead_letter_is_found_by_when_it_died"],
        IgnoresInstants,
    ),
    "lists the newest first always": Mutant(["test_a_list_is_as_long_as_asked_in_the_order_asked"], NewestFirstAlways),
    "lists payloads": Mutant(["test_a_list_has_sizes_and_no_payloads"], ListsPayloads),
    "sees no errors": hides("test_one_event_is_seen_whole", errors=()),
    "sees no owner": hides("test_a_leased_event_says_who_has_it", lease_owner=None),
    "finds the dead by their death": Mutant(["test_dead_letters_are_found_in_order_of_seq"], FindsTheDeadByDeath),
    "no letter holds its key": Mutant(["test_a_dead_letter_says_whether_its_key_waits_for_it"], NoLetterHoldsItsKey),
    "tells the oldest deeds": bug(
        "test_what_operators_did_is_told_newest_first",
        audited=["FROM {audit}", "FROM (SELECT -id AS id, at, operator, action, stream, event_id FROM {audit})"],
    ),
    "replays a queue's event as failed": bug(
        "test_a_replayed_event_of_a_queue_is_claimed_again", reenter=["'pending'", "'failed'"]
    ),
    # Consumers.
    "buries without an inbox row": Mutant(["test_an_event_of_a_consumer_is_buried_once"], BuriesWithoutAnInboxRow),
    "buries without looking whether it is new": bug(
        "test_an_event_of_a_consumer_is_buried_once",
        "test_of_many_copies_one_is_buried",
        "test_a_replay_and_deaths_at_once_lose_no_letter",
        count_as_applied=["DO NOTHING", "DO UPDATE SET dead = excluded.dead"],
    ),
    "buries the last error": Mutant(["test_a_dead_letter_has_the_whole_history_of_its_errors"], BuriesTheLastError),
    "buries what a writer could add": Mutant(
        ["test_a_foreign_event_that_no_writer_could_add_is_buried"], BuriesWhatAWriterCouldAdd
    ),
    "finishes without an inbox row": Mutant(["test_an_applied_event_is_not_buried"], FinishesWithoutAnInboxRow),
    "discards for every consumer": bug(
        "test_each_consumer_has_its_own_dead_letters", remove_dead=[" AND consumer = :consumer", ""]
    ),
    "counts the letters of every consumer": bug(
        "test_each_consumer_has_its_own_dead_letters", count_dead_of=["WHERE consumer = :consumer", ""]
    ),
    "counts consumers' letters as the relay's": bug(
        "test_a_consumers_dead_letter_is_none_of_a_relay", gauges=["consumer = '' AND ", ""]
    ),
    "replays consumers' letters as events": bug(
        "test_a_consumers_dead_letter_is_none_of_a_relay", lock_dead=[" AND consumer = :consumer", ""]
    ),
    "gives each letter the same seq": bug(
        "test_dead_letters_are_found_page_by_page_in_order_of_their_deaths", bury=[r"\(SELECT .*? > ''\)", "7"]
    ),
    "leases what is leased": bug(
        "test_a_replay_is_leased_by_one_worker_in_order", due_replays=[r"AND \(e.lease_until .*?\) ORDER", "ORDER"]
    ),
    "leases in order of the ids": bug(
        "test_a_replay_is_leased_by_one_worker_in_order", due_replays=["ORDER BY e.seq", "ORDER BY e.id DESC"]
    ),
    "finishes with any lease": bug(
        "test_a_lease_of_a_replay_that_ran_out_is_worth_nothing", finish_replay=["AND lease_token = :token", ""]
    ),
    "a replay leaves the inbox row": bug(
        "test_a_replay_makes_the_event_new_for_its_consumer", count_as_new=["WHERE", "WHERE 0 AND"]
    ),
    "a replay forgets the event for every consumer": bug(
        "test_a_replay_makes_the_event_new_for_its_consumer", count_as_new=["consumer = :consumer AND", ""]
    ),
    "a letter that died again waits for a replay": bug(
        "test_a_replay_makes_the_event_new_for_its_consumer", bury_again=["replay_at = NULL,", ""]
    ),
    "discards the inbox row": Mutant(["test_a_discarded_event_stays_applied"], DiscardsTheInboxRow),
    "audits no consumer": bug(
        "test_each_decision_leaves_an_audit_row_with_the_consumer", audit=[":event_id, :consumer", ":event_id, ''"]
    ),
    "prunes what waits for its replay": bug(
        "test_a_dead_letter_that_shall_be_applied_again_is_not_pruned", prune_dead=["AND replay_at IS NULL", ""]
    ),
    "leaves with all others": bug(
        "test_an_operator_sees_the_processes_of_consumers", leave_consumer=["AND name = :worker", ""]
    ),
    # Replay of published events.
    "replays what was published as asked": Mutant(
        ["test_published_events_enter_at_the_end_in_their_old_order"], ReplaysPublishedAsAsked
    ),
    "replays whatever its state": bug(
        "test_only_what_is_published_is_published_again",
        lock_published=[" AND status = 'published'", ""],
        unpublish=[" AND status = 'published'", ""],
    ),
    "replays past a held key": bug(
        "test_a_published_event_of_a_held_key_returns_to_its_old_place",
        unpublish=["status = 'failed'", "status = 'pending'"],
    ),
    "a replay of what was published frees a blocked key": bug(
        "test_a_replay_of_published_events_frees_no_blocked_key", free_key=["dead_head = :id", "1"]
    ),
    "charges what was published": bug(
        "test_a_replayed_event_fails_like_a_new_one", unpublish=["attempts = 0", "attempts = attempts"]
    ),
    "waits since it was written": bug(
        "test_a_replayed_event_waits_from_its_replay_on", unpublish=[", available_at = .* WHERE", " WHERE"]
    ),
    "replays nothing of a queue": bug(
        "test_a_published_event_of_a_queue_is_claimed_again", reenter=["'pending'", "'failed'"]
    ),
    "lists from the start": Mutant(["test_a_list_goes_on_behind_an_id"], ListsFromTheStart),
    # Identity.
    "an id is unique in all streams": Mutant(["test_an_id_is_unique_within_its_stream"], RefusesTheSecondStream),
    "settles in every stream": bug("test_a_settle_changes_its_own_stream_only", publish=["AND stream = :stream ", ""]),
    "deletes in every stream": bug(
        "test_deleting_what_is_published_spares_the_other_stream", remove=["AND stream = :stream ", ""]
    ),
    "dies in every stream": bug(
        "test_an_event_dies_in_one_stream_and_lives_in_the_other", remove=["AND stream = :stream ", ""]
    ),
    "replays in every stream": Mutant(["test_an_operator_decides_about_one_stream"], ForgetsTheStream),
    "finds one stream": Mutant(["test_an_id_is_found_in_every_stream"], FindsTheFirstStream),
    "publishes claims of every stream": bug(
        "test_a_claim_is_of_its_stream", publish_claims=[" AND stream = :stream", ""]
    ),
    "prunes one of an id": bug(
        "test_pruning_walks_over_both", prune_page=["FROM {event} WHERE", "FROM {event} GROUP BY id HAVING"]
    ),
    "forgets where a stream goes": bug(
        "test_a_stream_says_how_and_to_where_it_is_served", announce=["DO UPDATE SET .*$", "DO NOTHING"]
    ),
    "ignores the topic": Mutant(["test_events_are_found_by_topic_and_aggregate"], IgnoresTheTopic),
    # Re-entry, and several shards at once.
    "enters in order of writing": bug(
        "test_scheduled_events_enter_at_the_end_in_order_of_their_instants",
        "test_a_limit_takes_the_earliest_first",
        due=["ORDER BY next_attempt_at, seq", "ORDER BY seq"],
    ),
    "enters where it was": bug(
        "test_scheduled_events_enter_at_the_end_in_order_of_their_instants",
        reenter=[r"\(id,", "(seq, id,", "SELECT id,", "SELECT seq, id,"],
    ),
    "ignores the limit of re-entries": Mutant(["test_a_limit_takes_the_earliest_first"], ReentersAtOnce),
    "enters at the very end": bug(
        "test_what_is_written_after_a_re_entry_comes_after_it",
        reenter=[r"\(id,", "(seq, id,", "SELECT id,", "SELECT 1000000 + seq, id,"],
        add=[
            "INSERT INTO {event} .id,",
            "INSERT INTO {event} (seq, id,",
            "VALUES .:id,",
            "VALUES (abs(random() % 1000000), :id,",
        ],
    ),
    "loses a field on its way": bug(
        "test_a_re_entered_event_is_the_same_event",
        reenter=["SELECT id, stream, tenant, topic", "SELECT id, stream, tenant, ''"],
    ),
    "replays as asked": Mutant(["test_replayed_events_enter_at_the_end_in_their_old_order"], ReplaysAsAsked),
    "replays a head behind its key": bug(
        "test_a_replayed_head_returns_to_the_front_of_its_held_key",
        revive=["SELECT id, seq", "SELECT id, seq + 1000"],
    ),
    "reads one shard": Mutant(["test_a_read_of_several_shards_keeps_them_apart"], ReadsOneShard),
    "limits each shard": Mutant(["test_the_limits_of_a_read_are_for_all_its_shards"], LimitsEachShard),
    "reads a lost shard": bug("test_a_read_leaves_out_a_shard_that_is_lost", read_joint=[JOINT_FENCE, ""]),
    "reads one shard of a paused stream": bug("test_nothing_is_read_while_the_stream_is_paused", read=[PAUSED, ""]),
    "reads a paused stream": bug("test_nothing_is_read_while_the_stream_is_paused", read_joint=[PAUSED, ""]),
    "settles the first shard": Mutant(["test_several_shards_are_settled_together"], SettlesTheFirst),
    "settles one lost shard among several": bug(
        "test_a_settle_of_several_shards_leaves_out_what_is_lost", fence_joint=[JOINT_FENCE, ""]
    ),
    "names lost shards": Mutant(["test_a_settle_of_several_shards_leaves_out_what_is_lost"], NamesLostShards),
    "settles all or nothing": Mutant(["test_a_settle_of_several_shards_leaves_out_what_is_lost"], SettlesAllOrNothing),
    "answers for no shard": Mutant(["test_a_call_for_no_shard_does_nothing"], ReadsSomething),
    "settles a ticket without a batch": Mutant(
        ["test_a_shard_without_progress_has_nothing_to_settle"], SettlesWithoutATicket
    ),
    "settles a ticket each time": bug(
        "test_a_settled_batch_is_not_settled_again",
        "test_a_deleted_batch_is_settled_too",
        settled_batch=["settled_batch", "NULL"],
    ),
    "notes no batch": bug(
        "test_a_batch_is_settled_by_the_next_owner",
        "test_a_batch_is_noted_with_what_else_is_settled",
        note_batch=["settled_batch = :batch", "settled_batch = settled_batch"],
    ),
    "deletes nothing of a ticket": Mutant(["test_where_nothing_is_kept_the_events_are_deleted"], TicketsDeleteNothing),
    "settles a ticket of a lost shard": bug("test_a_stale_owner_settles_no_batch", settled_batch=[FENCE, ""]),
    "notes a batch of a lost shard": bug("test_a_stale_owner_settles_no_batch", note_batch=[FENCE, ""]),
    "notes any batch": bug(
        "test_a_batch_that_does_not_follow_the_last_one_is_not_settled", note_batch=[r" AND \(settled_batch .*", ""]
    ),
    "tells the batch of a lost shard": bug("test_the_last_settled_batch_is_told_to_the_owner", last_batch=[FENCE, ""]),
    "tells no batch": bug(
        "test_the_last_settled_batch_is_told_to_the_owner", last_batch=["SELECT settled_batch", "SELECT NULL"]
    ),
    "settles only pending events of a ticket": bug(
        "test_events_of_a_held_key_are_settled_too", publish=[", 'failed', 'held'", ""]
    ),
    "forgets the batch": Mutant(["test_a_settlement_without_a_batch_leaves_the_last_one"], ForgetsTheBatch),
    "hides events that are gone": Mutant(["test_events_that_are_gone_are_named"], TicketsHideWhatIsGone),
    "takes every ticket": Mutant(["test_what_does_not_fit_is_refused"], TicketsAlwaysFit),
    "has one progress for all shards": bug(
        "test_shards_and_streams_have_progress_of_their_own", note_batch=["WHERE .*", "WHERE 1 = 1"]
    ),
    "has a new identity each time": Mutant(["test_an_outbox_keeps_its_identity"], NewIdentityEachTime),
    "keeps what was settled under the old identity": bug(
        "test_a_new_identity_forgets_what_was_settled", forget_batches=["= NULL", "= settled_batch"]
    ),
    "changes the identity of owners": bug(
        "test_a_new_identity_forgets_what_was_settled", busy=["owner IS NOT NULL", "1 = 0"]
    ),
    "takes any identity": Mutant(["test_a_name_that_kafka_would_not_take_is_refused"], TakesAnyIdentity),
    "settles for no shard": Mutant(["test_a_call_for_no_shard_does_nothing"], SettlesSomething),
}


async def failure(mutant: Mutant, test: str, folder: Path) -> BaseException | None:
    """What went wrong in the test, if anything did."""
    made: list[Broken] = []

    def connect(*, shards: int = 4) -> Store:
        store = mutant.kind(str(folder / "outbox.db"), shards=shards)
        store.rewrite(mutant.rewrites or {})
        made.append(store)
        return store

    run = getattr(Contract(), test)
    given: dict[str, Any] = {"connect": connect}
    wanted = inspect.signature(run).parameters
    try:
        if "store" in wanted:
            given["store"] = store = connect()
            await store.migrate()
            await store.open()
        if "other" in wanted:
            given["other"] = other = connect()
            await other.open()
        await asyncio.wait_for(run(**{name: given[name] for name in wanted}), 30)
    except (Exception, pytest.fail.Exception) as error:
        return error
    finally:
        for store in made:
            await store.close()
    return None


@pytest.mark.asyncio
@pytest.mark.parametrize("test", TESTS)
async def test_a_healthy_store_passes(test: str, tmp_path: Path) -> None:
    error = await failure(Mutant([]), test, tmp_path)
    if error is not None:
        raise error


@pytest.mark.asyncio
@pytest.mark.parametrize("name", MUTANTS)
async def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    for place, test in enumerate(mutant.tests):
        folder = tmp_path / str(place)
        folder.mkdir()
        try:
            error = await failure(mutant, test, folder)
        except pytest.skip.Exception:
            pytest.fail(f"{test} was skipped: it cannot catch '{name}'")
        assert error is not None, f"the mutant '{name}' survived {test}"
        assert "mend the mutant" not in str(error), error


def test_every_test_of_the_contract_catches_a_mutant() -> None:
    caught = {test for mutant in MUTANTS.values() for test in mutant.tests}
    assert caught | NEED_MORE == set(TESTS)
    assert not caught & NEED_MORE
