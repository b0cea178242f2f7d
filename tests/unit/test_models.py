"""Payloads that do not fit the model of their type are refused, and no message shows a value."""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from traceback import format_exception
from typing import Any, Literal, NotRequired, TypedDict
from uuid import UUID, uuid4

import msgspec
import pydantic
import pytest

from pillarbox import InvalidEvent, Outbox
from pillarbox.errors import ConfigError

SECRET = "4111" * 4


class State(Enum):
    NEW = "new"


@dataclass
class Item:
    sku: str
    price: Decimal = Decimal(1)


@dataclass
class ByDataclass:
    id: int
    items: list[Item]
    note: str | None = None
    state: State = State.NEW
    labels: Mapping[str, int] = field(default_factory=dict)


class ByTypedDict(TypedDict):
    id: int
    items: list[Item]
    note: NotRequired[str | None]
    state: NotRequired[Literal["new"]]
    labels: NotRequired[dict[str, int]]


class PydanticItem(pydantic.BaseModel):
    sku: str
    price: Decimal = Decimal(1)


class ByPydantic(pydantic.BaseModel, extra="forbid"):
    id: int
    items: list[PydanticItem]
    note: str | None = None
    state: State = State.NEW
    labels: dict[str, int] = {}


class MsgspecItem(msgspec.Struct):
    sku: str
    price: Decimal = Decimal(1)


class ByMsgspec(msgspec.Struct, forbid_unknown_fields=True):
    id: int
    items: list[MsgspecItem]
    note: str | None = None
    state: State = State.NEW
    labels: dict[str, int] = {}


MODELS = [ByDataclass, ByTypedDict, ByPydantic, ByMsgspec]
GOOD: list[dict[str, Any]] = [
    {"id": 7, "items": []},
    {"id": 7, "items": [{"sku": "a"}, {"sku": "b", "price": Decimal("9.90")}], "note": None, "labels": {"a": 1}},
    {"id": 7, "items": (), "note": "hello", "state": State.NEW},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"items": []}, "id"),
    ({"id": SECRET + "x", "items": []}, "id"),
    ({"id": 7, "items": [{"price": "1"}]}, "items"),
    ({"id": 7, "items": [{"sku": "a", "price": SECRET + "x"}]}, "items"),
    ({"id": 7, "items": {SECRET: 1}}, "items"),
    ({"id": 7, "items": [], "note": [SECRET]}, "note"),
    ({"id": 7, "items": [], "state": SECRET}, "state"),
    ({"id": 7, "items": [], "labels": {SECRET: SECRET + "x"}}, "labels"),
    ({"id": 7, "items": [], "sate": SECRET}, "sate"),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("payload", GOOD)
def test_a_payload_that_fits(model: Any, payload: dict[str, Any]) -> None:
    event = Outbox(types={"order.created": model}).event("order.created", payload)
    assert json.loads(event.payload)["id"] == 7


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("payload", "name"), BAD)
def test_a_payload_that_does_not_fit(model: Any, payload: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidEvent) as caught:
        Outbox(types={"order.created": model}).event("order.created", payload)
    expected = f"the payload of order.created does not fit {model.__name__} at '{name}'; pass a payload as the model"
    assert str(caught.value).startswith(expected)
    assert SECRET not in "".join(format_exception(caught.value))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("payload", [[SECRET], SECRET, b"\xff", None])
def test_a_payload_that_is_no_object(model: Any, payload: Any) -> None:
    with pytest.raises(InvalidEvent, match=f"does not fit {model.__name__};"):
        Outbox(types={"order.created": model}).event("order.created", payload)


def test_instances_of_models() -> None:
    outbox = Outbox(types={model.__name__: model for model in MODELS})
    for payload in (
        ByDataclass(7, [Item("a")]),
        ByPydantic(id=7, items=[PydanticItem(sku="a")]),
        ByMsgspec(7, [MsgspecItem("a")]),
    ):
        assert outbox.event(type(payload).__name__, payload).content_type == "application/json"
    for wrong in (ByDataclass("7", []), ByMsgspec("7", [])):  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent, match="at 'id'"):
            outbox.event(type(wrong).__name__, wrong)


def test_bytes_and_text_are_checked_as_they_are_delivered() -> None:
    outbox = Outbox(types={"a": ByDataclass, "b": ByPydantic})
    for name in ("a", "b"):
        assert outbox.event(name, b'{"id": 7, "items": []}').payload == b'{"id": 7, "items": []}'
        with pytest.raises(InvalidEvent, match="at 'id'"):
            outbox.event(name, '{"id": null, "items": []}')


@dataclass
class Many:
    at: datetime
    uid: UUID
    pair: tuple[int, str]
    row: tuple[int, ...]
    some: set[int]
    ratio: float
    is_new: bool
    free: Any
    kind: Literal[1, "one"]


MANY: dict[str, Any] = {
    "at": datetime(2024, 2, 29),
    "uid": uuid4(),
    "pair": (1, "a"),
    "row": [1, 2],
    "some": {1},
    "ratio": 1,
    "is_new": True,
    "free": {"a": [1]},
    "kind": "one",
}


def test_types_that_json_has_not() -> None:
    Outbox(types={"many": Many}).event("many", MANY)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("at", "yesterday"),
        ("uid", "7"),
        ("pair", [1]),
        ("pair", ["a", 1]),
        ("row", ["a"]),
        ("some", 1),
        ("ratio", True),
        ("is_new", 1),
        ("kind", True),
    ],
)
def test_values_that_do_not_fit_them(name: str, wrong: Any) -> None:
    with pytest.raises(InvalidEvent, match=f"does not fit Many at '{name}'"):
        Outbox(types={"many": Many}).event("many", {**MANY, name: wrong})


def test_a_function_may_be_the_model() -> None:
    def positive(payload: Any) -> None:
        if payload["amount"] < 0:
            raise ValueError(SECRET)

    outbox = Outbox(types={"paid": positive, "anything": None})
    outbox.event("paid", {"amount": 1})
    outbox.event("anything", SECRET)
    with pytest.raises(InvalidEvent, match="the payload of paid does not fit positive; pass") as caught:
        outbox.event("paid", {"amount": -1})
    assert SECRET not in "".join(format_exception(caught.value))


def test_a_pydantic_adapter_may_be_the_model() -> None:
    outbox = Outbox(types={"listed": pydantic.TypeAdapter(list[int])})
    outbox.event("listed", [1])
    with pytest.raises(InvalidEvent, match="does not fit TypeAdapter"):
        outbox.event("listed", {"a": 1})


def test_a_type_that_is_not_listed() -> None:
    types = {"order.created": ByDataclass}
    Outbox(types=types).event("order.crated", {})
    strict = Outbox(types=types, strict=True)
    strict.event("order.created", {"id": 7, "items": []})
    with pytest.raises(
        InvalidEvent, match=r"'order\.crated' is not among the types .* did you mean 'order\.created'\?"
    ):
        strict.event("order.crated", {})
    with pytest.raises(InvalidEvent, match="list it there, or correct its name"):
        strict.event("mail", {})
    with pytest.raises(InvalidEvent, match="'7' is not among"):
        strict.event(7, {})  # type: ignore[arg-type]


def test_wrong_models_are_refused_when_the_outbox_is_made() -> None:
    @dataclass
    class Unknown:
        other: "Nowhere"  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match=r"the model of a is of type int; pass a Pydantic model"):
        Outbox(types={"a": 7})
    with pytest.raises(ConfigError, match=r"the model of a names a type that is not known \(name 'Nowhere'"):
        Outbox(types={"a": Unknown})
    with pytest.raises(ConfigError, match="pass types="):
        Outbox(strict=True)


def test_the_writers_transaction_can_roll_back(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "shop.db")
    connection.execute("CREATE TABLE orders (id integer)")
    outbox = Outbox(types={"order.created": ByDataclass})
    with suppress(InvalidEvent), connection:
        connection.execute("INSERT INTO orders VALUES (7)")
        outbox.add(connection, "order.created", {"id": "7"})
        pytest.fail("the payload does not fit")
    assert connection.execute("SELECT count(*) FROM orders").fetchone() == (0,)
    connection.close()
