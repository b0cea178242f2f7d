"""Handlers that take the model of a payload, several handlers of one type, and registries that include others."""

import asyncio
import sqlite3
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Protocol, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest

from pillarbox import Event, Handlers, Inbox, Outbox, Reject
from pillarbox.batch import Batch, Part
from pillarbox.errors import ConfigError
from pillarbox.publisher import Outcome, Result


class Size(Enum):
    SMALL = "small"


@dataclass(frozen=True)
class Item:
    name: str
    price: Decimal


@dataclass(frozen=True)
class AsDataclass:
    id: int
    day: date
    items: list[Item]
    size: Size | None = None
    tags: tuple[str, ...] = ()


class AsTyped(TypedDict):
    id: int


class AsPydantic(pydantic.BaseModel):
    id: int


class AsStruct(msgspec.Struct):
    id: int


class NamedEvent(Protocol):
    id: UUID


SENT = AsDataclass(7, date(2024, 2, 29), [Item("lamp", Decimal("9.90"))], Size.SMALL, ("a", "b"))


def publish(handlers: Handlers, *events: Event) -> list[Outcome]:
    async def run() -> list[Outcome]:
        await handlers.open()
        outcomes = await handlers.publish(Batch("default", [Part(None, 0, events)]))
        await handlers.close()
        return list(outcomes)

    return asyncio.run(run())


def order(payload: Any) -> Event:
    return Outbox().event("order.created", payload)


@pytest.mark.parametrize(
    ("model", "payload", "expected"),
    [
        (AsDataclass, SENT, SENT),
        (AsTyped, {"id": 7}, {"id": 7}),
        (AsPydantic, {"id": 7}, AsPydantic(id=7)),
        (AsStruct, {"id": 7}, AsStruct(id=7)),
        (dict, {"id": 7}, {"id": 7}),
        (dict[str, Any], {"id": 7}, {"id": 7}),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_takes_its_model(model: Any, payload: Any, expected: Any, is_async: bool) -> None:
    handlers, taken = Handlers(), []

    def take(given: model) -> None:
        taken.append(given)

    async def take_later(given: model) -> None:
        taken.append(given)

    handlers.on("order.created")(take_later if is_async else take)
    good, bad = publish(handlers, order(payload), order({"id": "s3cret"} if model is not dict else ["s3cret"]))
    assert taken[:1] == [expected]
    assert good.result is Result.PUBLISHED
    if model in (dict, dict[str, Any]):
        return
    assert bad.result is Result.REJECTED
    assert bad.error is not None
    assert "order.created does not fit" in bad.error
    assert "s3cret" not in bad.error


def test_an_inbox_gives_the_model_too(tmp_path: Any) -> None:
    async def make_tables() -> None:
        from pillarbox.stores.sqlite import SqliteStore

        store = SqliteStore(str(tmp_path / "mail.db"))
        await store.migrate()
        await store.close()

    asyncio.run(make_tables())
    handlers, taken = Handlers(), []

    @handlers.on("order.created")
    @Inbox("mailer").once(lambda: sqlite3.connect(tmp_path / "mail.db"))
    def take(given: AsPydantic, tx: sqlite3.Connection) -> None:
        taken.append(given)

    event = order({"id": 7})
    assert [outcome.result for outcome in publish(handlers, event, event)] == [Result.PUBLISHED] * 2
    assert taken == [AsPydantic(id=7)]


def test_an_annotation_that_is_no_model_is_refused() -> None:
    def wrong(order: Size) -> None: ...

    def unknown(order: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def for_checkers(event: "typing_only.Event") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def many(events: list[Event]) -> None: ...

    with pytest.raises(ConfigError, match="asks for a list; register it with on_batch"):
        Handlers().on("a")(many)
    with pytest.raises(ConfigError, match="asks for Size, which is neither the event nor a model"):
        Handlers().on("a")(wrong)
    with pytest.raises(ConfigError, match="asks for Missing, which is not known where it is defined"):
        Handlers().on("a")(unknown)
    Handlers().on("a")(for_checkers)


@pytest.mark.parametrize(
    "wanted", [Event, Any, object, tuple, Event | None, NamedEvent, Annotated[Event, "old"], "Event"]
)
def test_an_annotation_of_the_event_gives_the_event(wanted: Any) -> None:
    taken: list[Any] = []

    def take(event: wanted) -> None:
        taken.append(event)

    handlers, event = Handlers(), order({})
    handlers.on("order.created")(take)
    publish(handlers, event)
    assert taken == [event]


def test_several_handlers_run_in_turn_and_again_after_a_failure() -> None:
    handlers, calls = Handlers(), []
    is_broken = True

    @handlers.on("order.created")
    def first(event: Event) -> None:
        calls.append("first")

    @handlers.on("order.created")
    async def second(event: Event) -> None:
        calls.append("second")

    @handlers.on("order.created", timeout="5s")
    async def third(event: Event) -> None:
        calls.append("third")
        if is_broken:
            raise RuntimeError("not yet")

    @handlers.on("order.created", timeout="5s")
    async def fourth(event: Event) -> None:
        calls.append("fourth")

    event = order({})
    (failed,) = publish(handlers, event)
    assert (failed.result, failed.error) == (Result.RETRY, "RuntimeError: not yet")
    assert calls == ["first", "second", "third"]
    is_broken = False
    calls.clear()
    assert [outcome.result for outcome in publish(handlers, event, event)] == [Result.PUBLISHED] * 2
    assert sorted(calls) == sorted(["first", "second", "third", "fourth"] * 2)


def test_handlers_of_one_inbox_are_refused_because_the_second_would_be_skipped() -> None:
    def one(event: Event, tx: Any) -> None: ...

    def two(event: Event, tx: Any) -> None: ...

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(":memory:")

    handlers, inbox = Handlers(), Inbox("mailer")
    handlers.on("a")(inbox.once(connect)(one))
    with pytest.raises(ConfigError, match="use the same inbox, so that only the first one would run"):
        handlers.on("a")(inbox.once(connect)(two))
    handlers.on("a")(Inbox("search").once(connect)(two))


def test_a_batch_handler_is_the_only_one_of_its_type() -> None:
    handlers = Handlers()
    handlers.on("a")(print)
    with pytest.raises(
        ConfigError, match=r"takes lists of events; when both shall run, give each its own Handlers\(\)"
    ):
        handlers.on_batch("a")(repr)


def test_a_registry_includes_another() -> None:
    app, mail, calls = Handlers(), Handlers(), []
    mail.on("order.created")(lambda event: calls.append("mail"))
    app.on("order.created")(lambda event: calls.append("app"))
    app.include(mail)
    publish(app, order({}))
    assert calls == ["app", "mail"]
    with pytest.raises(ConfigError, match="register it once"):
        app.include(mail)
    with pytest.raises(ConfigError, match="include themselves"):
        app.include(app)


def test_an_event_reads_its_payload() -> None:
    assert order({"id": 7}).json() == {"id": 7}
    with pytest.raises(Reject, match=r"\(text/plain; charset=utf-8\) is not JSON"):
        order("s3cret").json()
