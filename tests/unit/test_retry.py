from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pillarbox.errors import ConfigError
from pillarbox.relay import Exponential, Fixed, Linear, Schedule

seconds = st.floats(0, 1e6, allow_nan=False)


def test_exponential_doubles_up_to_its_limit() -> None:
    policy = Exponential(base=1, factor=2, limit=10, jitter=False)
    assert [policy(attempts) for attempts in range(1, 7)] == [1, 2, 4, 8, 10, 10]


@given(seconds, st.floats(0, 1e6), seconds, st.booleans(), st.integers(1, 1_000_000))
@example(1.0, 1e6, 300.0, False, 100)
def test_exponential_never_passes_its_limit(
    base: float, factor: float, limit: float, jitter: bool, attempts: int
) -> None:
    assert 0 <= Exponential(base, factor, limit, jitter)(attempts) <= limit


def test_jitter_is_full() -> None:
    policy = Exponential(base=8, factor=2, limit=300)
    delays = [policy(2) for _ in range(2000)]
    assert min(delays) < 1
    assert max(delays) > 15
    assert sum(delays) / len(delays) == pytest.approx(8, rel=0.1)


@given(seconds, st.integers(1, 1_000_000))
def test_fixed_is_always_the_same(delay: float, attempts: int) -> None:
    assert Fixed(delay)(attempts) == delay


def test_linear_grows_by_its_step_up_to_its_limit() -> None:
    policy = Linear(step=5, limit=12)
    assert [policy(attempts) for attempts in (1, 2, 3, 1_000_000)] == [5, 10, 12, 12]


def test_a_schedule_has_each_wait_and_repeats_the_last_one() -> None:
    policy = Schedule(5, "5m", "30m")
    assert [policy(attempts) for attempts in (1, 2, 3, 4, 1_000_000)] == [5, 300, 1800, 1800, 1800]
    assert repr(policy) == "Schedule(5, '5m', '30m')"
    assert policy == Schedule(5, "5m", "30m") != Schedule(5, "5m")


def test_a_schedule_without_a_wait_says_how_to_write_one() -> None:
    with pytest.raises(ConfigError, match=r'write Schedule\("5s", "5m"\), or "schedule:5s,5m"'):
        Schedule()


@pytest.mark.parametrize("value", ["soon", None, -1.0, float("nan"), ""])
def test_a_schedule_names_a_wait_that_is_none(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"retry schedule is .*; use "):
        Schedule(5, value)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("policy", "setting"),
    [
        (Exponential, "base"),
        (Exponential, "factor"),
        (Exponential, "limit"),
        (Fixed, "wait"),
        (Linear, "step"),
        (Linear, "limit"),
    ],
)
def test_a_wrong_setting_names_itself(policy: type, setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"retry {setting} is {value}; use "):
        policy(**{setting: value})
