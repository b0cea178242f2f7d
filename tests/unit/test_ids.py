import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox import ids
from pillarbox.errors import InvalidEvent
from pillarbox.ids import stable_id, uuid7, uuid7_floor


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


class Colour(Enum):
    RED = "red"


class Record:
    """As an ORM has them: no text of its own."""


def test_a_stable_id_is_the_same_in_every_release() -> None:
    made = stable_id("page", 7, UUID(int=1), "é\udcff")
    assert str(made) == "6e2ea87c-b299-5fb7-ab1b-22bef26fbb6d"
    assert (made.version, made.variant) == (5, RFC_4122)


@given(st.lists(st.text(), min_size=1), st.lists(st.text(), min_size=1))
def test_other_parts_are_another_id(one: list[str], two: list[str]) -> None:
    assert (stable_id(*one) == stable_id(*two)) == (one == two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (["a", "bc"], ["ab", "c"]),
        (["a", "b"], ["a,b"]),
        (["a", "b"], ['a", "b']),
        (["a"], ["a", ""]),
        ([1, 2], [12]),
    ],
)
def test_parts_do_not_run_together(one: list[object], two: list[object]) -> None:
    assert stable_id(*one) != stable_id(*two)


def test_the_text_of_a_part_counts() -> None:
    assert stable_id("page", 7) == stable_id("page", "7")
    assert stable_id(Colour.RED) == stable_id("red")
    assert stable_id(UUID(int=7)) == stable_id(str(UUID(int=7)))
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    assert stable_id(noon) == stable_id(noon.astimezone(timezone(timedelta(hours=2))))


@pytest.mark.parametrize("part", [None, object(), Record(), Record, b"7", ["a"], ("a",), {"a": 1}, {1}])
def test_what_has_no_stable_text_is_refused(part: object) -> None:
    with pytest.raises(InvalidEvent, match="a part of stable_id is"):
        stable_id("page", part)


def test_nothing_identifies_nothing() -> None:
    with pytest.raises(InvalidEvent, match="was given nothing"):
        stable_id()
