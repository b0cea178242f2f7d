"""What a payload becomes, and what is refused before it can do harm."""

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox import Outbox
from pillarbox.errors import ConfigError, InvalidEvent
from pillarbox.payload import BYTES, JSON, MAX_DEPTH, TEXT, serialise


class Colour(Enum):
    RED = "red"


@dataclass
class Order:
    id: int
    placed_at: datetime


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("payload", "data", "content_type"),
    [
        (b"\x00\xff", b"\x00\xff", BYTES),
        ("grüße", "grüße".encode(), TEXT),
        ({}, b"{}", JSON),
        (None, b"null", JSON),
        ({"a": [1, 2.5, True, None, "ü"]}, '{"a":[1,2.5,true,null,"ü"]}'.encode(), JSON),
        (Order(7, datetime(2026, 1, 2, tzinfo=UTC)), b'{"id":7,"placed_at":"2026-01-02T00:00:00+00:00"}', JSON),
        (
            [UUID(int=1), Decimal("1.10"), date(2026, 1, 2), Colour.RED],
            b'["00000000-0000-0000-0000-000000000001","1.10","2026-01-02","red"]',
            JSON,
        ),
        ({"text": "a \\u0000 that is only text"}, b'{"text":"a \\\\u0000 that is only text"}', JSON),
        (nested(MAX_DEPTH), b"[" * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH, JSON),
        ({"text": "[" * 1000}, b'{"text":"' + b"[" * 1000 + b'"}', JSON),
    ],
)
def test_serialised_once(payload: Any, data: bytes, content_type: str) -> None:
    assert serialise(payload) == (data, content_type)


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        ({"x": float("nan")}, "NaN"),
        ({"x": float("inf")}, "NaN or infinity"),
        ({"x": "secret\0"}, "NUL"),
        ("secret\0", "NUL"),
        ({"x": "secret\\\0"}, "NUL"),
        ({"x": "secret\ud800"}, "lone surrogate"),
        ("secret\udfff", "lone surrogate"),
        (nested(MAX_DEPTH + 1), "nested deeper"),
        (nested(10_000), "nested deeper"),
        ({"x": object()}, "object"),
        ({("secret", 1): 1}, "JSON"),
    ],
)
def test_refused_without_quoting_it(payload: Any, named: str) -> None:
    with pytest.raises(InvalidEvent, match=named) as caught:
        serialise(payload)
    assert "secret" not in str(caught.value)


def test_payload_that_contains_itself() -> None:
    payload: list[Any] = []
    payload.append(payload)
    with pytest.raises(InvalidEvent, match="contains itself"):
        serialise(payload)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(has_nul(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(has_nul, value))


@given(json_values.filter(lambda value: not isinstance(value, str)))
def test_reads_back_or_is_refused(value: Any) -> None:
    if has_nul(value):
        with pytest.raises(InvalidEvent):
            serialise(value)
    else:
        assert json.loads(serialise(value)[0]) == value


class Unknown:
    """A type that JSON does not have."""


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ({"order": {"items": [{"price": 1}, {"price": Unknown()}]}}, " at order.items[1].price "),
        ([1, {"s3cret key": Unknown()}], r" at \[1\]\.\.\.\. "),
        ({"total": float("nan")}, " at total,"),
        (Order(7, Unknown()), " at placed_at "),  # type: ignore[arg-type]
        ({"order": {("a", "b"): 1}}, " at order "),
        (Unknown(), "as JSON "),
    ],
)
def test_the_field_that_cannot_be_written_is_named(payload: Any, place: str) -> None:
    pattern = place if "\\" in place else place.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(InvalidEvent, match=pattern) as raised:
        serialise(payload)
    assert "s3cret" not in str(raised.value)


def test_an_encoder_of_ones_own_is_asked_first() -> None:
    def encode(value: Any) -> Any:
        if isinstance(value, Unknown):
            return {"kind": "unknown"}
        if isinstance(value, Decimal):
            return float(value)
        raise TypeError

    payload = {"a": Unknown(), "b": Decimal("1.5"), "c": Colour.RED}
    assert json.loads(serialise(payload, encode)[0]) == {"a": {"kind": "unknown"}, "b": 1.5, "c": "red"}
    with pytest.raises(ConfigError, match="encoder is a str; pass a function"):
        Outbox(encoder="json")  # type: ignore[arg-type]
