import logging

import pytest

from pillarbox.relay.breaker import Breaker, Circuit
from pillarbox.relay.subject import stream_named


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(stream_named("orders"), "kafka b:9092", first_seconds=1.0, limit_seconds=5.0)


def test_a_destination_that_works_is_always_tried(breaker: Breaker) -> None:
    assert breaker.state is Circuit.CLOSED
    assert all(breaker.allows(now) for now in (0.0, 0.0, 1.0))
    assert not breaker.probing
    assert breaker.seconds_left(0.0) == 0


def test_an_outage_opens_it_for_a_while(breaker: Breaker) -> None:
    breaker.failed(10.0, "refused")
    assert not breaker.allows(10.0)
    assert not breaker.allows(10.99)
    assert breaker.seconds_left(10.25) == 0.75
    assert breaker.seconds_left(99.0) == 0


def test_one_probe_is_let_through(breaker: Breaker) -> None:
    breaker.failed(10.0, "refused")
    assert breaker.allows(11.0)
    assert breaker.probing
    assert not breaker.allows(11.0), "one probe is enough"


def test_a_probe_that_succeeds_closes_it(breaker: Breaker) -> None:
    breaker.failed(10.0, "refused")
    breaker.allows(11.0)
    breaker.succeeded()
    assert breaker.state is Circuit.CLOSED
    assert breaker.allows(11.0)


def test_each_probe_that_fails_doubles_the_wait_up_to_its_limit(breaker: Breaker) -> None:
    now, waits = 0.0, []
    breaker.failed(now, "refused")
    for _ in range(5):
        waits.append(breaker.seconds_left(now))
        now += waits[-1]
        assert breaker.allows(now)
        breaker.failed(now, "refused")
    assert waits == [1, 2, 4, 5, 5]


def test_the_wait_starts_anew_after_it_closed(breaker: Breaker) -> None:
    breaker.failed(0.0, "refused")
    breaker.allows(1.0)
    breaker.failed(1.0, "refused")
    breaker.allows(3.0)
    breaker.succeeded()
    breaker.failed(9.0, "refused")
    assert breaker.seconds_left(9.0) == 1


def test_calls_that_were_under_way_when_it_opened_do_not_lengthen_the_wait(breaker: Breaker) -> None:
    breaker.failed(10.0, "refused")
    breaker.failed(10.5, "refused")
    assert breaker.allows(11.0)


def test_a_probe_that_tells_nothing_leaves_room_for_another(breaker: Breaker) -> None:
    breaker.failed(10.0, "refused")
    breaker.allows(11.0)
    breaker.inconclusive()
    assert breaker.allows(11.0)
    assert breaker.probing


def test_inconclusive_means_nothing_without_a_probe(breaker: Breaker) -> None:
    breaker.inconclusive()
    assert breaker.state is Circuit.CLOSED
    breaker.failed(10.0, "refused")
    breaker.inconclusive()
    assert not breaker.allows(10.5)


def test_an_outage_that_names_a_wait_keeps_it_open_for_at_least_that_long(breaker: Breaker) -> None:
    breaker.failed(10.0, "busy", 30.0)
    assert breaker.seconds_left(10.0) == 30, "longer than the limit"
    assert not breaker.allows(39.9)
    assert breaker.allows(40.0)
    breaker.failed(40.0, "busy", 0.5)
    assert breaker.seconds_left(40.0) == 2, "the usual wait is longer"


def test_a_call_that_was_under_way_can_name_a_longer_wait(breaker: Breaker) -> None:
    breaker.failed(10.0, "busy", 3.0)
    breaker.failed(10.5, "busy", 7.0)
    breaker.failed(10.6, "busy", 1.0)
    assert breaker.seconds_left(10.5) == 7


@pytest.mark.parametrize("wait", [float("nan"), -1.0])
def test_a_wait_that_is_nonsense_changes_nothing(breaker: Breaker, wait: float) -> None:
    breaker.failed(10.0, "busy", wait)
    breaker.failed(10.0, "busy", wait)
    assert breaker.seconds_left(10.0) == 1


def test_a_worker_polls_at_the_latest_after_the_usual_limit(breaker: Breaker) -> None:
    assert breaker.pause_seconds(0.0) == 0
    breaker.failed(10.0, "busy", 600.0)
    assert breaker.pause_seconds(10.0) == 5
    assert breaker.pause_seconds(609.0) == 1


def test_each_change_is_reported() -> None:
    changes: list[tuple[str, Circuit]] = []
    breaker = Breaker(
        stream_named("orders"), "kafka b:9092", on_change=lambda stream, state: changes.append((stream, state))
    )
    breaker.succeeded()
    breaker.inconclusive()
    breaker.failed(0.0, "refused")
    breaker.failed(0.1, "refused")
    breaker.allows(1.0)
    breaker.inconclusive()
    breaker.allows(1.0)
    breaker.succeeded()
    breaker.succeeded()
    states = [Circuit.OPEN, Circuit.HALF_OPEN, Circuit.OPEN, Circuit.HALF_OPEN, Circuit.CLOSED]
    assert changes == [("orders", state) for state in states]


def test_it_says_once_that_it_opened_and_once_that_it_closed(
    breaker: Breaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    breaker.failed(0.0, "refused")
    breaker.failed(0.1, "refused")
    breaker.allows(1.0)
    breaker.failed(1.0, "refused")
    breaker.allows(3.0)
    breaker.succeeded()
    breaker.succeeded()
    assert [getattr(record, "action", None) for record in caplog.records] == ["circuit_opened", "circuit_closed"]
    assert "orders" in caplog.text
    assert "kafka b:9092" in caplog.text
    assert "refused" in caplog.text
