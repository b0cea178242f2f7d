"""The rule that decides to which streams an event is written."""

import pickle
import sqlite3
from typing import Any

import pytest

from pillarbox import Aggregate, InvalidEvent, Outbox, UnitOfWork
from pillarbox.errors import ConfigError
from pillarbox.event import Event

SHOP = {"order.created": "fast", "order.*": ["default", "search"], "*.deleted": "audit"}


def streams(outbox: Outbox, type: str, **fields: Any) -> list[str]:
    """The streams to which an event is written."""
    with outbox.capture(write=False) as events:
        outbox.add(None, type, {"id": 1}, **fields)
    assert len({event.id for event in events}) == 1, "it is one event"
    return [event.stream for event in events]


@pytest.mark.parametrize(
    ("type", "wanted"),
    [
        ("order.created", ["fast"]),
        ("order.paid", ["default", "search"]),
        ("order.deleted", ["default", "search"]),
        ("user.deleted", ["audit"]),
        ("user.created", ["default"]),
        ("orderXcreated", ["default"]),
        ("order.", ["default", "search"]),
        ("order.line\nbreak", ["default", "search"]),
    ],
)
def test_the_first_type_that_fits_decides(type: str, wanted: list[str]) -> None:
    assert streams(Outbox(routes=SHOP), type) == wanted


def test_a_function_decides_by_the_whole_event() -> None:
    def own_stream(event: Event) -> list[str]:
        return [event.tenant, "audit"] if event.tenant == "acme" else ["default"]

    outbox = Outbox(routes=own_stream)
    assert streams(outbox, "t", tenant="acme") == ["acme", "audit"]
    assert streams(outbox, "t", tenant="other") == ["default"]


def test_a_stream_that_is_named_wins() -> None:
    assert streams(Outbox(routes=SHOP), "order.paid", stream="mail") == ["mail"]
    assert streams(Outbox(routes=lambda event: 1 / 0), "t", stream="mail") == ["mail"]  # type: ignore[arg-type]


def test_without_routes_there_is_one_stream() -> None:
    assert streams(Outbox(), "order.paid") == ["default"]


def test_an_event_made_before_it_is_written_keeps_its_streams() -> None:
    outbox = Outbox(routes=SHOP)
    made = outbox.event("order.paid", {})
    assert made.stream == "default"
    sent = made._replace(key="7", stream=pickle.loads(pickle.dumps(made.stream)))
    with outbox.capture(write=False) as events:
        outbox.add_all(None, [sent, made._replace(stream="mail")])
    assert [event.stream for event in events] == ["default", "search", "mail"]
    assert {type(event.stream) for event in events} == {str}


class Order(Aggregate):
    aggregate_type = "order"
    id: int | None = None


def test_an_event_of_an_aggregate_is_routed_when_it_has_its_id() -> None:
    outbox = Outbox(routes=lambda event: "big" if event.aggregate_id == "1000" else ["default", "search"])
    with outbox.capture(write=False) as events:
        for number in (7, 1000):
            with UnitOfWork(outbox, sqlite3.connect(":memory:")) as uow:
                order = uow.track(Order())
                order.add_event("order.created", {})
                order.add_event("order.mailed", {}, stream="mail")
                order.id = number
    assert [event.stream for event in events] == ["default", "search", "mail", "big", "mail"]


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ({}, "routes is empty"),
        ("search", "routes is of type str; pass a mapping"),
        (["search"], "routes is of type list; pass a mapping"),
        ({"": "search"}, "routes has '' as a type of events"),
        ({7: "search"}, "routes has 7 as a type of events"),
        ({"order.*": []}, r"routes: 'order.\*': the list is empty"),
        (
            {"order.*": None},
            r"routes: 'order.\*': it is of type NoneType; use the name of a stream, or a list of names",
        ),
        ({"order.*": {"search"}}, "it is of type set"),
        ({"order.*": ["search", "default", "search"]}, "it names the stream 'search' twice"),
        ({"order.*": ["search", 7]}, "stream is of type int"),
        ({"order.*": ""}, "stream is empty"),
        ({"order.*": "x" * 101}, "stream has 101 characters"),
        ({"order.*": "a", "order.paid": "b"}, r"'order.paid' is never reached, because 'order.\*' comes before it"),
        ({"*": "a", "order.*": "b"}, r"'order.\*' is never reached, because '\*' comes before it"),
    ],
)
def test_wrong_routes_are_refused_at_once(routes: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Outbox(routes=routes)


def test_a_function_cannot_be_awaited() -> None:
    async def later(event: Event) -> str:
        return "search"

    with pytest.raises(ConfigError, match="routes is an async function"):
        Outbox(routes=later)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "of type NoneType"),
        ([], "the list is empty"),
        (["a", "a"], "'a' twice"),
        ("\0", "NUL"),
        ([b"a"], "bytes"),
    ],
)
def test_a_wrong_answer_of_a_function_is_refused_in_the_transaction(answer: Any, said: str) -> None:
    outbox = Outbox(routes=lambda event: answer)
    with pytest.raises(InvalidEvent, match=f"gave no streams for an event of type 't': .*{said}"):
        outbox.event("t", {"secret": "hunter2"})
