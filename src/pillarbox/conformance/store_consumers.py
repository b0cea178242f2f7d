"""Tests of a store: dead letters of consumers, their replays, and the processes of consumers."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import pytest

from pillarbox.conformance.store_setup import LEASE, PAST, STREAM, AuditRow, StoreSetup, ids, settle
from pillarbox.errors import ConfigError
from pillarbox.event import Event, Status
from pillarbox.store import ConsumerReport, Failure, Filter, Found, Ref, Replay, Settlement, Store

CARDS: Final = "cards"
MAIL: Final = "mail"
_COPIES: Final = 16
# Fields of events that were never checked: too long, too large, with NUL, with half of a surrogate pair.
_FOREIGN: Final[Sequence[dict[str, Any]]] = (
    {"key": "k" * 3000, "type": "t" * 3000, "topic": "a" * 3000},
    {"key": "a\0b", "type": "\0", "headers": {"h\0": "\0"}},
    {"key": "\udcff", "type": "\udcff", "headers": {"h": "\udcff"}},
    {"aggregate_id": "7", "aggregate_version": 10**40, "max_attempts": 10**40},
    {"aggregate_version": -(2**63) - 1, "max_attempts": 0},
)
_REPORT: Final = ConsumerReport("kafka orders", 12, 1, 3, 1500, 2.5, "orders/3: gone\norders/4: gone")


class ConsumerTests(StoreSetup):
    """What a consumer asks of a store."""

    async def bury(self, store: Store, event: Event, error: str = "refused", consumer: str = CARDS) -> bool:
        return await store.bury(consumer, Failure(event, error, 5))

    async def listed(self, store: Store, consumer: str = CARDS) -> Sequence[Found]:
        return await store.find_dead(Filter(consumer=consumer), 100)

    async def replay(self, store: Store, *events: Event, consumer: str = CARDS) -> int:
        return await store.replay([Ref(event.id, event.stream, consumer) for event in events], "olga")

    async def take(self, store: Store, seconds: float = LEASE, *, limit: int = 10) -> Sequence[Replay]:
        return await store.take_replays(CARDS, "ann", limit, seconds)

    @pytest.mark.asyncio
    async def test_an_event_of_a_consumer_is_buried_once(self, store: Store, other: Store) -> None:
        self.need_transactions()
        event = self.event(payload=b"\x00\xff", headers={"a": "b"}, aggregate_id="7", aggregate_version=3)
        assert await self.bury(store, event)
        assert not await self.bury(other, event, "a copy")
        (found,) = await store.find_by_id(event.id, CARDS)
        assert found.event._replace(seq=0) == event._replace(
            seq=0,
            attempts=5,
            status=Status.DEAD,
            created_at=found.event.created_at,
            occurred_at=found.event.occurred_at,
        )
        assert (found.last_error, found.consumer, found.replay_at) == ("refused", CARDS, None)
        assert [entry["error"] for entry in found.errors] == ["refused"]

    @pytest.mark.asyncio
    async def test_an_applied_event_is_not_buried(self, store: Store) -> None:
        self.need_transactions()
        event = self.event()
        await self.bury(store, event)
        await self.replay(store, event)
        (replay,) = await self.take(store)
        assert await store.finish_replay(CARDS, replay)
        assert not await self.bury(store, event, "a late copy failed")
        assert not await self.listed(store)

    @pytest.mark.asyncio
    async def test_a_dead_letter_has_the_whole_history_of_its_errors(self, store: Store) -> None:
        self.need_transactions()
        event = self.event()
        earlier = [{"at": "2030-01-01T00:00:00.000+00:00", "attempts": n, "error": f"$try {n}"} for n in (1, 2)]
        assert await store.bury(CARDS, Failure(event, "refused", 3), earlier)
        (letter,) = await store.dead_letters(consumer=CARDS)
        assert [(entry["attempts"], entry["error"]) for entry in letter.errors] == [
            (1, "$try 1"),
            (2, "$try 2"),
            (3, "refused"),
        ]

    @pytest.mark.asyncio
    async def test_of_many_copies_one_is_buried(self, store: Store, other: Store) -> None:
        self.need_transactions()
        events = self.events(3)
        for event in events:
            async with asyncio.timeout(60):
                buried = await asyncio.gather(*(self.bury((store, other)[n % 2], event) for n in range(_COPIES)))
            assert sum(buried) == 1
        assert [found.event.id for found in await self.listed(store)] == ids(events)
        assert await store.dead_count(CARDS) == 3

    @pytest.mark.asyncio
    async def test_each_consumer_has_its_own_dead_letters(self, store: Store) -> None:
        self.need_transactions()
        event = self.event()
        for consumer in (CARDS, MAIL):
            assert await self.bury(store, event, consumer=consumer)
        assert await store.dead_consumers() == {CARDS: 1, MAIL: 1}
        assert await store.discard([Ref(event.id, event.stream, MAIL)], "olga") == 1
        assert await store.dead_consumers() == {CARDS: 1}
        assert (await store.dead_count(CARDS), await store.dead_count(MAIL)) == (1, 0)
        assert [found.consumer for found in await self.listed(store)] == [CARDS]

    @pytest.mark.asyncio
    async def test_a_consumers_dead_letter_is_none_of_a_relay(self, store: Store) -> None:
        self.need_transactions()
        grant = await self.own(store)
        mine, published = await self.write(store, grant, *self.events(2))
        await settle(store, Settlement(grant, published=[published], dead=[Failure(mine, "of the relay", 1)]))
        for event in (mine, published):
            await self.bury(store, event)
        assert await self.count(store) == {Status.PUBLISHED: 1, Status.DEAD: 1}
        assert {gauges.stream: gauges.counts for gauges in await store.gauges()} == {STREAM: {Status.DEAD: 1}}
        assert [letter.error for letter in await store.dead_letters()] == ["of the relay"]
        assert [found.last_error for found in await store.find_dead(Filter(), 10)] == ["of the relay"]
        assert [found.event.status for found in await store.find_by_id(published.id)] == [Status.PUBLISHED]
        assert [found.last_error for found in await store.find_by_id(mine.id, CARDS)] == ["refused"]
        assert ids(found.event for found in await store.find(Filter(consumer=CARDS), 10, newest_first=False)) == sorted(
            ids([mine, published])
        )
        assert await store.replay([Ref(mine.id, STREAM)], "olga") == 1
        assert await self.count(store) == {Status.PUBLISHED: 1, Status.PENDING: 1}
        assert len(await self.listed(store)) == 2, "the relay's replay took a consumer's dead letter"
        await self.replay(store, mine, published)
        assert await self.count(store) == {Status.PUBLISHED: 1, Status.PENDING: 1}

    @pytest.mark.asyncio
    async def test_dead_letters_are_found_page_by_page_in_order_of_their_deaths(self, store: Store) -> None:
        self.need_transactions()
        events = self.events(5)
        for event in reversed(events):
            await self.bury(store, event)
        found: list[Found] = []
        while page := await store.find_dead(Filter(consumer=CARDS), 2, found[-1].event.seq if found else 0):
            found += page
        assert [each.event.id for each in found] == ids(reversed(events))
        chosen = Filter(consumer=CARDS, key=events[1].key)
        assert [each.event.id for each in await store.find_dead(chosen, 10)] == [events[1].id]
        by_id = Filter(consumer=CARDS, stream=STREAM, ids=ids(events[:2]))
        assert [each.event.id for each in await store.find_dead(by_id, 10)] == ids(events[1::-1])

    @pytest.mark.asyncio
    async def test_a_replay_is_leased_by_one_worker_in_order(self, store: Store, other: Store) -> None:
        self.need_transactions()
        events = self.events(4)
        for event in events:
            await self.bury(store, event)
        assert not await self.take(store), "nobody has asked for it"
        assert await self.replay(store, *events[2::-1]) == 3
        (first,) = await self.take(store, limit=1)
        others = await other.take_replays(CARDS, "bob", 10, LEASE)
        assert [each.event.id for each in (first, *others)] == ids(events[:3])
        assert (first.error, first.event.attempts, first.event.payload) == ("refused", 0, events[0].payload)
        assert not await self.take(store)
        assert not await store.take_replays(MAIL, "ann", 10, LEASE)
        waiting = [found.replay_at is not None for found in await self.listed(store)]
        assert waiting == [True, True, True, False]

    @pytest.mark.asyncio
    async def test_a_lease_of_a_replay_that_ran_out_is_worth_nothing(self, store: Store) -> None:
        self.need_transactions()
        event = self.event()
        await self.bury(store, event)
        await self.replay(store, event)
        (lost,) = await self.take(store, PAST)
        (held,) = await self.take(store)
        assert held.event.id == lost.event.id
        assert not await store.finish_replay(CARDS, lost)
        assert not await store.finish_replay(MAIL, held)
        assert await store.finish_replay(CARDS, held)
        assert not await store.finish_replay(CARDS, held)
        assert not await self.listed(store)

    @pytest.mark.asyncio
    async def test_a_replay_makes_the_event_new_for_its_consumer(self, store: Store) -> None:
        self.need_transactions()
        event = self.event()
        await self.bury(store, event)
        await self.bury(store, event, consumer=MAIL)
        assert await self.replay(store, event) == 1
        (first,) = await self.listed(store)
        (replay,) = await self.take(store)
        assert await self.bury(store, event, "refused again"), "the inbox still has the event"
        (letter,) = await self.listed(store)
        assert (letter.last_error, letter.replay_at, letter.event.seq) == ("refused again", None, first.event.seq)
        (whole,) = await store.dead_letters(consumer=CARDS)
        assert [entry["error"] for entry in whole.errors] == ["refused", "refused again"]
        assert not await self.take(store)
        assert not await store.finish_replay(CARDS, replay), "it is dead again, and this lease with it"
        assert not await self.bury(store, event, "a copy")
        assert not await self.bury(store, event, "a copy", consumer=MAIL)

    @pytest.mark.asyncio
    async def test_a_discarded_event_stays_applied(self, store: Store) -> None:
        self.need_transactions()
        dead, waiting = self.events(2)
        for event in (dead, waiting):
            await self.bury(store, event)
        await self.replay(store, waiting)
        (replay,) = await self.take(store)
        assert await store.discard([Ref(each.id, each.stream, CARDS) for each in (dead, waiting)], "igor") == 2
        assert not await store.finish_replay(CARDS, replay)
        for event in (dead, waiting):
            assert not await self.bury(store, event, "a copy")
        assert not await self.listed(store)

    @pytest.mark.asyncio
    async def test_each_decision_leaves_an_audit_row_with_the_consumer(self, store: Store) -> None:
        self.need_transactions()
        one, two = self.events(2)
        for event in (one, two):
            await self.bury(store, event)
        assert await self.replay(store, one, self.event()) == 1
        assert await store.discard([Ref(two.id, two.stream, CARDS)], "igor") == 1
        assert list(await self.audit(store)) == [
            AuditRow("olga", "replay", STREAM, one.id, CARDS),
            AuditRow("igor", "discard", STREAM, two.id, CARDS),
        ]

    @pytest.mark.asyncio
    async def test_a_dead_letter_that_shall_be_applied_again_is_not_pruned(self, store: Store) -> None:
        self.need_transactions()
        old, waiting = self.events(2)
        for event in (old, waiting):
            await self.bury(store, event)
        await self.replay(store, waiting)
        assert await store.prune_dead(LEASE, 10) == 0
        assert await store.prune_dead(PAST, 10) == 1
        assert [found.event.id for found in await self.listed(store)] == [waiting.id]

    @pytest.mark.asyncio
    async def test_a_replay_and_deaths_at_once_lose_no_letter(self, store: Store, other: Store) -> None:
        self.need_transactions()
        event = self.event()
        await self.bury(store, event)

        async def decide() -> None:
            await self.replay(other, event)

        for _ in range(5):
            async with asyncio.timeout(60):
                await asyncio.gather(decide(), *(self.bury(store, event, "again") for _ in range(4)), decide())
            assert len(await self.listed(store)) == 1
        await self.replay(store, event)
        (replay,) = await self.take(store)
        assert await store.finish_replay(CARDS, replay)
        assert not await self.bury(store, event)

    @pytest.mark.asyncio
    async def test_a_foreign_event_that_no_writer_could_add_is_buried(self, store: Store) -> None:
        self.need_transactions()
        for fields in _FOREIGN:
            event = self.event()._replace(**fields)
            assert await store.bury(CARDS, Failure(event, "no JSON: \0 \udcff", 1))
            (found,) = await store.find_by_id(event.id, CARDS)
            assert (found.event.payload, found.last_error, found.unreadable) == (event.payload, "no JSON: ? ?", "")
            assert await self.replay(store, event) == 1
            assert [replay.event.id for replay in await self.take(store)] == [event.id]

    @pytest.mark.asyncio
    async def test_an_operator_sees_the_processes_of_consumers(self, store: Store, other: Store) -> None:
        self.need_transactions()
        assert not await store.consumers()
        unknown = ConsumerReport("kafka $orders", 0, 0, 0, None, None)
        await store.report(MAIL, "eve", unknown, LEASE)
        await store.report(CARDS, "bob", unknown, LEASE)
        await store.report(CARDS, "bob", _REPORT, LEASE)
        await other.report(CARDS, "ann", unknown, PAST)
        seen = await store.consumers()
        assert [(each.consumer, each.worker, each.live, each.report) for each in seen] == [
            (CARDS, "ann", False, unknown),
            (CARDS, "bob", True, _REPORT),
            (MAIL, "eve", True, unknown),
        ]
        assert all(0 <= each.seen_seconds < LEASE for each in seen)
        await other.leave_consumer(CARDS, "bob")
        await other.leave_consumer(MAIL, "ann")
        assert [(each.consumer, each.worker) for each in await store.consumers()] == [(CARDS, "ann"), (MAIL, "eve")]

    @pytest.mark.asyncio
    async def test_a_database_without_transactions_refuses_a_consumer(self, store: Store) -> None:
        if self.features.transactions:
            pytest.skip("this store has transactions")
        event = self.event()
        ref, replay = Ref(event.id, event.stream, CARDS), Replay(event, "refused", 7)
        for call in (
            lambda: self.bury(store, event),
            lambda: self.take(store),
            lambda: store.finish_replay(CARDS, replay),
            lambda: store.report(CARDS, "ann", _REPORT, LEASE),
            lambda: store.replay([ref], "olga"),
            lambda: store.discard([ref], "olga"),
        ):
            with pytest.raises(ConfigError, match="transactions"):
                await call()
        assert not await store.dead_consumers()
