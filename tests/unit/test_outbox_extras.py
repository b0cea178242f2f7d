"""Payloads of models, trace context, capture, and handles that no writer knows."""

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from pillarbox import InvalidEvent, Outbox
from pillarbox.errors import ConfigError

OUTBOX = Outbox()
ID = UUID(int=7)
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass
class Line:
    sku: str
    price: Decimal


class Order(pydantic.BaseModel):
    id: UUID
    at: datetime
    lines: list[Line]
    ratio: float = 0.5


class Card(msgspec.Struct, rename="camel"):
    card_id: UUID
    at: datetime
    ratio: float = 0.5


def test_a_pydantic_model_is_json() -> None:
    order = Order(id=ID, at=AT, lines=[Line("a", Decimal("1.10"))])
    event = OUTBOX.event("order.created", order)
    assert event.content_type == "application/json"
    assert Order.model_validate_json(event.payload) == order
    assert OUTBOX.event("order.created", {"order": order, "cards": [Card(ID, AT)]}).payload.startswith(
        b'{"order":{"id"'
    )


def test_a_msgspec_struct_is_json_with_its_own_names() -> None:
    card = Card(ID, AT)
    event = OUTBOX.event("card.changed", card)
    assert b"cardId" in event.payload
    assert msgspec.json.decode(event.payload, type=Card) == card


@pytest.mark.parametrize(
    "payload",
    [
        Order(id=ID, at=AT, lines=[], ratio=float("nan")),
        Card(ID, AT, float("inf")),
        {"deep": Card(ID, AT, float("nan"))},
        Order,
        Card,
    ],
)
def test_a_model_that_json_cannot_hold_is_refused(payload: Any) -> None:
    with pytest.raises(InvalidEvent):
        OUTBOX.event("x", payload)


@pytest.fixture
def span() -> Iterator[SpanContext]:
    context = SpanContext(
        trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=TraceFlags(1), trace_state=TraceState([("a", "b")])
    )
    with trace.use_span(NonRecordingSpan(context)):
        yield context


def test_the_trace_context_of_the_current_span_goes_with_the_event(span: SpanContext) -> None:
    event = OUTBOX.event("x", {}, headers={"own": "1"})
    assert event.headers == {
        "own": "1",
        "traceparent": "00-00000000000000000000000000000abc-0000000000000def-01",
        "tracestate": "a=b",
    }


def test_an_own_trace_context_is_kept(span: SpanContext) -> None:
    own = {"traceparent": "00-11111111111111111111111111111111-2222222222222222-00"}
    assert OUTBOX.event("x", {}, headers=own).headers == own


def test_without_a_span_there_is_no_trace_context() -> None:
    assert OUTBOX.event("x", {}).headers == {}


def test_a_recording_span_of_the_sdk() -> None:
    with TracerProvider().get_tracer("shop").start_as_current_span("order") as span:
        event = OUTBOX.event("x", {})
    assert event.headers["traceparent"].split("-")[1] == f"{span.get_span_context().trace_id:032x}"


def test_capture_needs_no_database_and_sees_every_thread() -> None:
    with OUTBOX.capture(write=False) as events:
        OUTBOX.add(SimpleNamespace(), "one", {})
        thread = threading.Thread(target=OUTBOX.add, args=(None, "two", {}))
        thread.start()
        thread.join()
        with OUTBOX.capture(write=False) as inner:
            OUTBOX.add_all(None, [OUTBOX.event("three", {}), OUTBOX.event("four", {})])
    assert [event.type for event in events] == ["one", "two", "three", "four"]
    assert [event.type for event in inner] == ["three", "four"]
    with pytest.raises(ConfigError):
        OUTBOX.add(None, "five", {})


def test_an_unknown_handle_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"types\.SimpleNamespace.*sqlalchemy.*psycopg.*sqlite3"):
        OUTBOX.add(SimpleNamespace(), "x", {})


def test_an_unknown_way_to_treat_duplicates() -> None:
    with pytest.raises(ConfigError, match="'raise' or 'ignore'"):
        OUTBOX.add(None, "x", {}, on_duplicate="replace")  # type: ignore[arg-type]


def test_an_event_that_was_written_leaves_nothing_to_await() -> None:
    with OUTBOX.capture(write=False):
        added = OUTBOX.add(None, "x", {})
    assert added.pending is None
    del added
    gc.collect()
