import threading
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox import ids
from pillarbox.ids import uuid7, uuid7_floor


def milliseconds(value: UUID) -> int:
    return value.int >> 80


def test_it_is_a_version_7_of_now() -> None:
    before = time.time_ns() // 1_000_000
    made = uuid7()
    after = time.time_ns() // 1_000_000
    assert made.version == 7
    assert made.variant == RFC_4122
    # Others of this process may have pushed it ahead of the clock, by far less than this.
    assert before <= milliseconds(made) <= after + 60_000


def test_each_is_greater_than_the_one_before() -> None:
    made = [uuid7() for _ in range(20_000)]
    assert made == sorted(set(made))


def test_the_order_is_that_of_bytes_and_of_text() -> None:
    made = [uuid7() for _ in range(1000)]
    assert sorted(made, key=lambda each: each.bytes) == made
    assert sorted(made, key=str) == made


def test_threads_never_make_the_same() -> None:
    start = threading.Barrier(4)

    def make(_: int) -> list[UUID]:
        start.wait()
        return [uuid7() for _ in range(5000)]

    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(make, range(4)))
    assert all(run == sorted(run) for run in runs)
    assert len({each for run in runs for each in run}) == 20_000


@pytest.mark.parametrize("step_back_seconds", [0, 1, 3600])
def test_a_clock_that_steps_back_or_stands_still_is_borne(
    monkeypatch: pytest.MonkeyPatch, step_back_seconds: int
) -> None:
    first = uuid7()
    stopped = time.time_ns() - step_back_seconds * 1_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: stopped)
    made = [first, *(uuid7() for _ in range(10_000))]
    assert made == sorted(set(made))
    assert all(each.version == 7 and each.variant == RFC_4122 for each in made)


def test_the_time_is_read_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_last", 0)
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_500_000)
    made = uuid7()
    assert milliseconds(made) == 1_700_000_000_123
    assert made.int >> 64 & 0xFFF == 2048, "half a millisecond"


def test_the_random_part_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_500_000)
    assert len({uuid7().int & 0x3FFF_FFFF_FFFF_FFFF for _ in range(100)}) == 100


@given(st.integers(0, 2**47), st.integers(0, 999_999))
def test_the_floor_is_below_its_instant_and_above_all_before(millisecond: int, nanosecond: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids, "_last", 0)
        patch.setattr(time, "time_ns", lambda: millisecond * 1_000_000 + nanosecond)
        made = uuid7()
    assert uuid7_floor(millisecond / 1000) <= made
    assert uuid7_floor((millisecond + 1.5) / 1000) > made


@pytest.mark.parametrize("seconds", [0.0, -1.0, -1e12])
def test_the_floor_of_long_ago_is_the_lowest(seconds: float) -> None:
    assert uuid7_floor(seconds) <= uuid7()
    assert uuid7_floor(seconds).version == 7
