import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.errors import StoreDown
from pillarbox.relay.ordered.ownership import quota
from pillarbox.relay.pace import DOZE_AFTER_SECONDS, BatchSize, Pace, Patience


class TestPace:
    def test_right_after_work_the_next_poll_comes_at_once(self) -> None:
        pace = Pace(0.1, 2.0)
        assert pace.wait() < 0.01

    def test_the_wait_grows_to_the_idle_time_and_then_to_the_limit(self) -> None:
        pace = Pace(0.1, 2.0)
        waits = []
        while not pace.drowsy:
            waits.append(pace.wait())
        assert max(waits) <= 0.11
        assert all(later > earlier * 1.1 for earlier, later in pairwise(waits[:6]))
        late = [pace.wait() for _ in range(30)]
        assert max(late) <= 2.2
        assert min(late[-5:]) >= 1.8

    def test_work_starts_it_anew(self) -> None:
        pace = Pace(0.1, 2.0)
        for _ in range(50):
            pace.wait()
        pace.worked()
        assert not pace.drowsy
        assert pace.wait() < 0.01

    def test_it_gets_drowsy_after_a_second_without_work(self) -> None:
        pace = Pace(0.1, 10.0)
        waited = 0.0
        while not pace.drowsy:
            assert waited < DOZE_AFTER_SECONDS * 1.2
            waited += pace.wait()
        assert waited >= DOZE_AFTER_SECONDS * 0.85

    def test_workers_that_started_together_drift_apart(self) -> None:
        paces = [Pace(0.1, 2.0) for _ in range(20)]
        assert len({round(pace.wait(), 9) for pace in paces}) > 10

    @given(st.floats(0.001, 10), st.floats(0.001, 10), st.integers(1, 60))
    def test_it_never_waits_longer_than_the_limit(self, one: float, other: float, times: int) -> None:
        pace = Pace(min(one, other), max(one, other))
        for _ in range(times):
            assert 0 < pace.wait() <= max(one, other) * 1.1 + 1e-9


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
