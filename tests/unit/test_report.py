"""The log lines about events that failed or died."""

import logging
from typing import Any
from uuid import UUID

import pytest

from pillarbox.conformance.events import make_event
from pillarbox.event import Event
from pillarbox.relay.report import Limit, Report
from pillarbox.relay.subject import stream_named
from pillarbox.store import PARKED, ClaimResults, Failure, Grant, Hold, HoldMode, Settlement

GRANT = Grant("orders", 0, "ann", 1)
ID = UUID("01890000-0000-7000-8000-000000000001")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def report(clock: Clock) -> Report:
    return Report(stream_named("orders"), 20, clock=clock)


def event(**fields: Any) -> Event:
    return make_event(**{"id": ID, "type": "order.created", "key": "7", "payload": b"secret", **fields})


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_failure_says_when_it_is_tried_again(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    failure = Failure(event(), "RuntimeError: busy", 1)
    report.settled(Settlement(GRANT, failed=[failure], hold_keys={"7": Hold(HoldMode.RETRYING, 4.2)}))
    said = f"stream 'orders': order.created {ID} key 7 failed, attempt 1 of 20, next in 4.2 s: RuntimeError: busy"
    assert lines(caplog) == [("WARNING", said)]
    fields = {name: getattr(caplog.records[0], name) for name in ("action", "stream", "event_id", "attempts")}
    assert fields == {"action": "failed", "stream": "orders", "event_id": str(ID), "attempts": 1}


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            Failure(event(key=None), "busy", 1, 600.0),
            f"order.created {ID} failed, attempt 1 of 20, next in 10 min: busy",
        ),
        (Failure(event(max_attempts=3), "busy", 2, 42.0), "attempt 2 of 3, next in 42 s"),
        (Failure(event(), "busy", 2, 42.0, limit=5), "attempt 2 of 5, next in 42 s"),
        (Failure(event(attempts=2), "no handler", 2, 5.0), "has to wait, no attempt is charged, next in 5.0 s"),
        (
            Failure(event(key="a\nERROR b"), "x\ny", 1, 1.0),
            r"key a\nERROR b failed, attempt 1 of 20, next in 1.0 s: x\ny",
        ),
    ],
)
def test_a_failure_is_one_line(report: Report, failure: Failure, words: str, caplog: pytest.LogCaptureFixture) -> None:
    report.settled(Settlement(GRANT, failed=[failure]))
    ((_, said),) = lines(caplog)
    assert words in said
    assert "\n" not in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("attempts", "hold", "words"),
    [
        (20, None, "is dead after 20 attempts: busy; see: pillarbox dead show"),
        (1, None, "was rejected and is dead: busy; see: pillarbox dead show"),
        (20, HoldMode.BLOCKED, "busy; its key waits until you replay or discard it; see"),
        (20, HoldMode.PARKED, "busy; later events of its key die too, until you replay or discard it; see"),
    ],
)
def test_a_death_says_what_to_do(
    report: Report, attempts: int, hold: HoldMode | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    holds = {} if hold is None else {"7": Hold(hold, None, ID)}
    report.settled(Settlement(GRANT, dead=[Failure(event(), "busy", attempts)], hold_keys=holds))
    ((level, said),) = lines(caplog)
    assert (level, said.startswith(f"stream 'orders': order.created {ID} key 7 ")) == ("ERROR", True)
    assert words in said
    assert said.endswith(f"pillarbox dead show {ID}")


def test_parked_events_are_told_once_for_each_key(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    for key in ("7", "8", "7"):
        report.settled(Settlement(GRANT, dead=[Failure(event(key=key), PARKED, 0)] * 3))
    assert [said.partition(" die")[0] for _, said in lines(caplog)] == [
        "stream 'orders': events of key 7",
        "stream 'orders': events of key 8",
    ]


def test_a_claim_has_charged_its_attempt_already(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    charged, free = Failure(event(attempts=2), "busy", 2, 1.0), Failure(event(attempts=2), "no handler", 1, 1.0)
    report.settled_claims(ClaimResults(failed=[charged, free], dead=[Failure(event(attempts=20), "busy", 20)]))
    assert ["attempt 2 of 20" in said for _, said in lines(caplog)] == [True, False, False]
    assert [level for level, _ in lines(caplog)] == ["WARNING", "WARNING", "ERROR"]


def test_many_failures_become_one_line(report: Report, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    results = ClaimResults(failed=[Failure(event(), "busy", 1, 1.0)] * 25, dead=[Failure(event(), "busy", 20)] * 15)
    report.settled_claims(results)
    assert [level for level, _ in lines(caplog)] == ["WARNING"] * 10 + ["ERROR"] * 10
    caplog.clear()
    clock.now += 9
    report.summarise()
    assert not lines(caplog), "its time is not over"
    clock.now += 1
    report.summarise()
    report.summarise()
    assert lines(caplog) == [
        ("WARNING", "stream 'orders': 15 more failures in the last 10 s"),
        ("ERROR", "stream 'orders': 5 more events died in the last 10 s; see: pillarbox dead list --stream orders"),
    ]
    assert [getattr(record, "count", 0) for record in caplog.records] == [15, 5]


def test_a_stop_keeps_no_line_back(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    report.settled_claims(ClaimResults(failed=[Failure(event(), "busy", 1, 1.0)] * 11))
    report.summarise(at_once=True)
    assert lines(caplog)[-1][1] == "stream 'orders': 1 more failures in the last 10 s"


def test_a_new_window_has_new_lines() -> None:
    limit = Limit(lines=1, seconds=10)
    assert [limit.passes(0.0), limit.passes(1.0)] == [True, False]
    assert [limit.withheld(9.9), limit.withheld(10.0), limit.withheld(10.0)] == [0, 1, 0]
    assert limit.passes(10.0)


def test_a_report_has_a_logger_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    own = Report(stream_named("orders"), 20, logging.getLogger("shop.outbox"))
    own.settled_claims(ClaimResults(dead=[Failure(event(), "busy", 20)]))
    assert [record.name for record in caplog.records] == ["shop.outbox"]
