from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.durations import is_duration, seconds_of
from pillarbox.errors import ConfigError
from pillarbox.relay import Exponential, Fixed, Linear, Schedule
from pillarbox.relay.retry import retry_of


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("500ms", 0.5),
        ("15s", 15.0),
        ("10m", 600.0),
        ("24h", 86_400.0),
        ("7d", 604_800.0),
        ("1.5h", 5400.0),
        ("0s", 0.0),
        ("90", 90.0),
        (90, 90.0),
        (0.25, 0.25),
        (0, 0.0),
    ],
)
def test_a_duration_is_a_text_with_a_unit_or_a_number_of_seconds(value: Any, seconds: float) -> None:
    found = seconds_of("lease", value)
    assert found == seconds
    assert type(found) is float


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("", "''"),
        ("s", "'s'"),
        ("15 s", "'15 s'"),
        ("15S", "'15S'"),
        ("15min", "'15min'"),
        ("1w", "'1w'"),
        ("1h30m", "'1h30m'"),
        ("-5s", "'-5s'"),
        ("1e3", "'1e3'"),
        ("nan", "'nan'"),
        ("\u0661s", "'\u0661s'"),
        ("15s\n", "'15s\\n'"),
        ("9" * 5000, f"'{'9' * 40}...'"),
        (True, "True"),
        (None, "None"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (10**400, "a number of more than 15 digits"),
        ([15], "of type list"),
        (b"15s", "of type bytes"),
    ],
)
def test_everything_else_is_refused_with_its_name_its_value_and_the_remedy(value: Any, shown: str) -> None:
    with pytest.raises(ConfigError) as refused:
        seconds_of("lease", value)
    assert str(refused.value).startswith(f'lease is {shown}; use a duration such as "500ms", "15s"')


@pytest.mark.parametrize("value", [-1, -0.001, 1e10, "36501d"])
def test_a_duration_has_bounds_that_every_database_can_count_with(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^keep is .*; use 0 to 36500d$"):
        seconds_of("keep", value)


def test_bounds_are_part_of_the_range() -> None:
    assert seconds_of("poll", "1ms", "1ms", "10s") == 0.001
    assert seconds_of("poll", 10, "1ms", "10s") == 10
    with pytest.raises(ConfigError, match=r"^poll is '11s'; use 1ms to 10s$"):
        seconds_of("poll", "11s", "1ms", "10s")


def test_an_instant_is_never_taken_for_a_duration() -> None:
    assert is_duration("2h")
    assert not is_duration("20300131")
    assert not is_duration("soon")


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.binary(), st.lists(st.integers())))
def test_a_value_is_a_finite_number_of_seconds_or_refused(value: Any) -> None:
    try:
        seconds = seconds_of("lease", value)
    except ConfigError:
        return
    assert 0 <= seconds <= 36_500 * 86_400


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("exponential", Exponential()),
        ("exponential:base=2s,limit=10m,jitter=false", Exponential(base="2s", limit="10m", jitter=False)),
        ("exponential:2s,factor=3", Exponential("2s", 3.0)),
        ("fixed:30s", Fixed("30s")),
        ("fixed:wait=30s", Fixed("30s")),
        ("linear:step=1s,limit=9s", Linear("1s", "9s")),
        ("schedule:5s,5m,1800", Schedule("5s", "5m", "1800")),
    ],
)
def test_a_retry_policy_has_a_text(text: str, wanted: Any) -> None:
    assert retry_of(text) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fixd:30s", "did you mean 'fixed'?"),
        ("fixed:wiat=30s", "fixed has no 'wiat'; did you mean 'wait'?"),
        ("fixed:30s,wait=5s", "two values for 'wait'"),
        ("fixed:soon", "retry wait is 'soon'; use a duration"),
        ("exponential:factor=much", "retry factor is 'much'; use a number from 0"),
        ("exponential:factor=nan", "retry factor is nan; use a number from 0"),
        ("exponential:jitter=no", "retry jitter is 'no'; use true or false"),
        ("fixed:wait_seconds=3", "fixed has no 'wait_seconds'"),
        ("schedule", "a retry schedule needs a wait"),
        ("schedule:5s,soon", "retry schedule is 'soon'; use a duration"),
        ("schedule:5s,", "retry schedule is ''; use a duration"),
        (None, "retry is of type NoneType; pass a policy"),
        (30, "retry is of type int; pass a policy"),
    ],
)
def test_a_wrong_retry_policy_is_refused(text: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        retry_of(text)
    assert said in str(refused.value)
