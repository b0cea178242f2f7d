import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.errors import StoreDown
from pillarbox.relay.ordered.ownership import quota
from pillarbox.relay.pace import REST_AFTER_SECONDS, WAKE_ABOVE, BatchSize, Pace, Patience


class TestPace:
    """Instants are seconds; a poll takes a millisecond where nothing else is said."""

    def test_the_first_poll_comes_at_once(self) -> None:
        assert Pace(0.1, 2.0).next_at == 0.0

    def test_polls_in_vain_grow_rare_up_to_the_limit(self) -> None:
        pace, now, waits = Pace(0.1, 2.0), 0.0, []
        for _ in range(40):
            pace.begin_poll()
            pace.polled(now, 0.001, found=False, ready=False)
            waits.append(pace.next_at - now)
            now = pace.next_at
        assert 0.45 <= waits[0] <= 0.83
        assert max(waits) <= 2.2
        assert min(waits[-5:]) >= 1.8

    @pytest.mark.parametrize(("events", "factor"), [(0, 20), (1, 5)])
    def test_looks_take_a_small_share_of_the_time(self, events: int, factor: int) -> None:
        pace = Pace(0.1, 2.0)
        pace.looked(10.0, 0.001, 1)
        pace.begin_look()
        pace.looked(10.5, 0.003, events)
        assert pace.look_at - 10.5 == pytest.approx(0.003 * factor, rel=0.11)

    def test_a_look_never_waits_longer_than_a_poll_of_a_busy_stream(self) -> None:
        pace = Pace(0.1, 2.0)
        pace.looked(10.0, 3.0, 1)
        assert pace.look_at - 10.0 <= 0.11

    def test_a_slow_poll_is_rare(self) -> None:
        pace = Pace(0.1, 2.0)
        pace.begin_poll()
        pace.polled(10.0, 0.01, found=True, ready=True)
        assert pace.poll_at - 10.0 == pytest.approx(1.0, rel=0.11)

    @pytest.mark.parametrize(("urgent", "seconds"), [(False, 0.5), (True, 0.1)])
    def test_what_only_a_poll_finds_makes_polls_frequent(self, urgent: bool, seconds: float) -> None:
        pace = Pace(0.1, 2.0)
        pace.begin_poll()
        pace.polled(10.0, 0.0001, found=True, ready=True, urgent=urgent)
        assert pace.poll_at - 10.0 == pytest.approx(seconds, rel=0.11)

    def test_a_look_in_vain_costs_more_than_its_answer_takes(self) -> None:
        pace = Pace(0.1, 2.0)
        pace.looked(10.0, 0.00001, 1)
        assert 0 < pace.look_at - 10.0 < 0.002
        pace.begin_look()
        pace.looked(10.1, 0.00001, 0)
        assert pace.look_at - 10.1 > 0.005

    def test_a_stream_at_rest_is_polled_and_not_looked_at(self) -> None:
        pace = Pace(0.1, 2.0)
        pace.looked(10.0, 0.001, 1)
        pace.begin_look()
        pace.looked(10.0 + REST_AFTER_SECONDS * 0.9, 0.001, 0)
        assert pace.look_at < math.inf
        pace.begin_look()
        pace.looked(10.0 + REST_AFTER_SECONDS * 1.1, 0.001, 0)
        assert pace.look_at == math.inf

    def test_who_is_told_does_not_look_by_itself(self) -> None:
        pace = Pace(0.1, 2.0, told=True)
        pace.looked(10.0, 0.001, 1)
        assert pace.look_at == math.inf
        pace.wake(10.1)
        assert (pace.look_at, pace.woken) == (10.1, True)

    def test_who_is_told_soon_after_a_look_waits_so_that_events_share_a_turn(self) -> None:
        pace = Pace(0.1, 2.0, told=True)
        pace.looked(10.0, 0.001, 1)
        pace.wake(10.001)
        assert 10.001 < pace.look_at < 10.01
        pace.begin_look()
        pace.looked(10.1, 0.001, 1, more=True)
        assert 10.1 < pace.look_at < 10.11, "the store told of events during the look"
        pace.begin_look()
        pace.wake(10.2)
        assert pace.look_at == 10.2

    def test_what_happens_during_an_ask_leads_to_the_next_one(self) -> None:
        pace = Pace(0.1, 2.0, told=True)
        pace.begin_poll()
        pace.wake(10.1)
        pace.polled(10.2, 0.2, found=False, ready=False)
        assert (pace.look_at, pace.woken) == (10.1, True)
        pace.begin_look()
        pace.wake(10.3)
        pace.looked(10.4, 0.1, 5)
        assert (pace.look_at, pace.woken) == (10.3, True)
        pace.begin_poll()
        pace.hurry()
        pace.polled(10.5, 0.1, found=False, ready=False, pause=5.0)
        assert pace.poll_at == 0.0

    def test_who_is_told_of_nothing_although_events_come_looks_by_itself(self) -> None:
        pace = Pace(0.1, 2.0, told=True)
        for now in (10.0, 10.1, 10.2):
            assert pace.look_at == math.inf
            pace.begin_poll()
            pace.polled(now, 0.001, found=True, ready=True)
        assert pace.look_at < 10.3
        pace.begin_look()
        pace.wake(10.3)
        pace.begin_look()
        pace.looked(10.4, 0.001, 1)
        assert pace.look_at == math.inf, "it can trust again"

    def test_a_pause_keeps_polls_and_looks_away(self) -> None:
        pace = Pace(0.1, 2.0)
        pace.begin_poll()
        pace.polled(10.0, 0.001, found=True, ready=True, pause=3.0)
        assert pace.next_at == 13.0

    def test_many_events_are_polled_for_and_few_are_told_of(self) -> None:
        pace = Pace(0.1, 2.0)
        assert pace.may_doze(10.0)
        for place in range(4 * WAKE_ABOVE):
            pace.looked(10.0 + place / (2 * WAKE_ABOVE), 0.001, 1)
        assert pace.must_wake(12.0)
        assert not pace.may_doze(12.0)
        assert pace.may_doze(15.0)

    def test_many_wake_ups_of_others_count_too(self) -> None:
        pace = Pace(0.1, 2.0, told=True)
        for place in range(4 * WAKE_ABOVE):
            pace.wake(10.0 + place / (2 * WAKE_ABOVE))
        assert pace.must_wake(12.0)

    def test_workers_that_started_together_drift_apart(self) -> None:
        paces = [Pace(0.1, 2.0) for _ in range(20)]
        for pace in paces:
            pace.begin_poll()
            pace.polled(10.0, 0.001, found=True, ready=True)
        assert len({round(pace.poll_at, 9) for pace in paces}) > 10
        assert len({round(pace.look_at, 9) for pace in paces}) > 10

    @given(st.floats(0.001, 10), st.floats(0.001, 10), st.lists(st.tuples(st.booleans(), st.floats(0, 20)), min_size=1))
    def test_it_never_waits_longer_than_the_limit(
        self, one: float, other: float, polls: list[tuple[bool, float]]
    ) -> None:
        pace, now = Pace(min(one, other), max(one, other)), 0.0
        for found, seconds in polls:
            now += seconds
            pace.begin_poll()
            pace.polled(now, seconds, found=found, ready=found)
            assert now < pace.next_at <= now + max(one, other) * 1.1 + 1e-9


class TestBatchSize:
    def test_it_grows_while_turns_are_quick_and_full(self) -> None:
        for seconds, wanted in ((0.01, [500, 2000, 3000, 3000]), (0.3, [500, 1000, 2000, 3000])):
            batch = BatchSize(3000)
            sizes = []
            for _ in range(4):
                sizes.append(batch.size)
                batch.turned(batch.size, seconds)
            assert sizes == wanted

    def test_it_begins_with_what_the_destination_takes_at_first(self) -> None:
        assert [BatchSize(limit, first=2000).size for limit in (10, 2000, 5000)] == [10, 2000, 2000]

    def test_it_stays_where_turns_are_not_full_or_neither_quick_nor_slow(self) -> None:
        batch = BatchSize(2000)
        batch.turned(499, 0.01)
        batch.turned(500, batch.quick_seconds)
        assert batch.size == 500

    def test_it_shrinks_while_turns_are_slow_but_never_to_nothing(self) -> None:
        batch = BatchSize(2000)
        for _ in range(20):
            batch.turned(batch.size, batch.slow_seconds + 0.5)
        assert batch.size == 1
        batch.turned(1, 0.01)
        assert batch.size == 4

    @given(st.integers(1, 100_000), st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 10))))
    def test_it_never_leaves_its_bounds(self, limit: int, turns: list[tuple[int, float]]) -> None:
        batch = BatchSize(limit)
        for events, seconds in turns:
            batch.turned(events, seconds)
            assert 1 <= batch.size <= limit


@given(st.integers(1, 1024), st.integers(1, 2000))
def test_the_shares_of_all_workers_are_fair_and_cover_every_shard(shards: int, live: int) -> None:
    shares = [quota(shards, live, rank) for rank in range(live)]
    assert sum(shares) == shards
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("live", [0, -1])
def test_a_worker_that_sees_nobody_alive_not_even_itself_takes_all(live: int) -> None:
    assert quota(16, live, 0) == 16


class TestPatience:
    def test_it_waits_longer_each_time_up_to_its_limit(self) -> None:
        patience = Patience("orders", "postgresql db:5432/shop")
        error = StoreDown("away")
        assert [patience.after(error) for _ in range(8)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
        patience.reset()
        assert patience.after(error) == pytest.approx(0.1)

    def test_it_logs_once_when_the_database_goes_and_once_when_it_comes_back(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        patience = Patience("orders", "postgresql db:5432/shop")
        patience.reset()
        patience.after(StoreDown("away"))
        patience.after(StoreDown("away"))
        patience.reset()
        patience.reset()
        assert [getattr(record, "action", None) for record in caplog.records] == ["store_down", "store_up"]
