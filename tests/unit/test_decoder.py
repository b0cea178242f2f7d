"""Decoders: what we and others write becomes the same event."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pillarbox import stable_id
from pillarbox.conformance.events import make_event
from pillarbox.consumer.decoder import UNREADABLE_TYPE, decode, make_decoder, message_of, unreadable
from pillarbox.envelopes import ENVELOPES, envelope_named, kafka
from pillarbox.errors import ConfigError, Reject
from pillarbox.event import Event
from pillarbox.source import Lane, Message

LANE = Lane("cards/0")
ID = UUID("01890000-0000-7000-8000-000000000001")
AT = datetime(2026, 3, 1, 12, 30, 15, 250_000, UTC)
FULL = make_event(
    id=ID,
    type="user.updated",
    topic="cards",
    key="7",
    tenant="acme",
    aggregate_type="user",
    aggregate_id="7",
    aggregate_version=12,
    schema_id="http://schemas/user",
    schema_version="2",
    occurred_at=AT,
    created_at=AT,
    headers={"region": "eu", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    payload=b'{ "name":  "Zo\xc3\xab", "n": 1.0 }',
)


def message(
    body: bytes = b"{}", given: Mapping[str, str] | None = None, *, key: bytes | None = b"7", **headers: str
) -> Message:
    pairs = [(name.replace("__", "-"), value.encode()) for name, value in {**(given or {}), **headers}.items()]
    return Message(LANE, 3, "cards", key, body, pairs, written_at=AT, place="cards/0/3")


def written(event: Event, envelope: str) -> Message:
    key, body, headers = kafka(envelope_named(envelope))(event)
    return Message(LANE, 3, "cards", key, body or b"", headers, written_at=AT)


def shown(event: Event) -> dict[str, Any]:
    """The fields that a message carries, in every envelope."""
    unsent = ("seq", "stream", "routing_key", "attempts", "max_attempts", "status", "available_at", "headers")
    return {name: value for name, value in event._asdict().items() if name not in unsent}


@pytest.mark.parametrize("envelope", [name for name in ENVELOPES if not name.startswith("debezium")])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"payload": b"\x00\xff", "content_type": "application/octet-stream"},
        {"aggregate_version": None, "aggregate_id": None, "schema_id": "17", "schema_version": None},
        {"payload": b'{"payload":[1],"data":{"data":"x"}}'},
        {"key": None},
    ],
)
def test_what_we_write_is_read_back(envelope: str, fields: Mapping[str, Any]) -> None:
    event = FULL._replace(**fields)
    found = decode(written(event, envelope))
    assert shown(found) == shown(event)
    assert found.headers["region"] == "eu"
    assert found.headers["traceparent"] == FULL.headers["traceparent"]
    assert found.stream == "default"
    assert (found.seq, found.attempts, found.max_attempts) == (0, 0, None)


def test_an_event_without_most_fields() -> None:
    event = make_event(id=ID, topic="cards", key=None, occurred_at=AT, created_at=AT)
    assert shown(decode(written(event, "raw"))) == shown(event)


def test_the_outbox_router_of_debezium() -> None:
    found = decode(
        message(b'{"id":7}', id=str(ID), eventType="user.created", aggregateType="user", occurred_at="1772368215250000")
    )
    assert (found.id, found.type, found.aggregate_type) == (ID, "user.created", "user")
    assert (found.key, found.payload, found.occurred_at) == ("7", b'{"id":7}', AT)


@pytest.mark.parametrize("envelope", ["debezium", "debezium_base64"])
def test_the_fields_that_debezium_keeps_are_read_back(envelope: str) -> None:
    found = decode(written(FULL, envelope))
    kept = ("id", "type", "tenant", "content_type", "key", "payload", "topic")
    assert [getattr(found, name) for name in kept] == [getattr(FULL, name) for name in kept]
    assert found.headers == {}


def test_an_id_that_only_looks_like_base64() -> None:
    text = "not base64, but 24 of =="
    assert decode(message(b"{}", id=text)).id == stable_id("message", "cards", text)


def test_a_structured_cloud_event_of_another_producer() -> None:
    body = {
        "specversion": "1.0",
        "id": "A234-1234-1234",
        "source": "/mycontext",
        "type": "com.example.someevent",
        "time": "2026-03-01T12:30:15.25Z",
        "comexampleextension1": "value",
        "othervalue": 5,
        "data": {"a": [1, None]},
    }
    found = decode(message(json.dumps(body).encode(), content__type="application/CloudEvents+json; charset=UTF-8"))
    assert found.id == stable_id("message", "cards", "A234-1234-1234")
    assert (found.type, found.occurred_at, found.content_type) == ("com.example.someevent", AT, "application/json")
    assert json.loads(found.payload) == {"a": [1, None]}
    assert found.headers == {"ce_comexampleextension1": "value", "ce_othervalue": "5"}


def test_a_binary_cloud_event_of_another_broker() -> None:
    found = decode(message(b"x", {"ce-id": str(ID), "ce-type": "t", "ce-source": "/s", "content-type": "text/plain"}))
    assert (found.id, found.type, found.content_type, found.payload) == (ID, "t", "text/plain", b"x")


def test_a_plain_producer_that_gives_an_id() -> None:
    found = decode(message(b'{"a":1}', message_id="order-7", type="order.created", region="eu"))
    assert found.id == stable_id("message", "cards", "order-7")
    assert (found.type, found.created_at, found.headers) == ("order.created", AT, {"region": "eu"})
    of_the_broker = message(b"{}")._replace(message_id="order-7", content_type="text/json")
    assert decode(of_the_broker).id == found.id
    assert decode(of_the_broker).content_type == "text/json"
    assert decode(of_the_broker).type == "message"


def test_a_message_without_an_id_is_refused() -> None:
    with pytest.raises(Reject, match=r'the message has no id.*with ids="place"'):
        decode(message())


def test_a_place_can_be_the_id() -> None:
    by_place = make_decoder(ids="place")
    again = message()._replace(lane=Lane("another assignment"))
    assert by_place(message()).id == by_place(again).id == stable_id("place", "cards", "cards/0/3")
    assert by_place(message(event_id=str(ID))).id == ID
    assert by_place(message()._replace(position=4, place="cards/0/4")).id != by_place(message()).id
    with pytest.raises(ConfigError, match="ids='offset': use one of: required, place"):
        make_decoder(ids="offset")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "body", "said"),
    [
        ({"content__type": "application/cloudevents+json"}, b"{", "is not JSON"),
        ({"content__type": "application/cloudevents+json"}, b"[]", "no JSON object"),
        ({"content__type": "application/cloudevents+json"}, b'{"id":"1","data_base64":"*"}', "is not base64"),
        ({"content__type": "application/cloudevents+json"}, b'{"id":"1","time":"soon"}', "not ISO 8601"),
        ({"event_id": "1", "aggregate_version": "x"}, b"", "no whole number"),
        ({"event_id": "1", "occurred_at": "9" * 30}, b"", "not ISO 8601"),
    ],
)
def test_a_message_that_cannot_be_read_says_why(headers: dict[str, str], body: bytes, said: str) -> None:
    with pytest.raises(Reject, match=said):
        decode(message(body, headers))


def test_a_document_that_only_looks_like_the_legacy_one_stays_as_it_is() -> None:
    for body in (b'{"_id":"7","name":"x"}', b'{"_id":"7",', b'{"_id":"7"}x'):
        assert decode(message(body, event_id=str(ID))).payload == body
    with pytest.raises(Reject, match="has no id"):
        decode(message(b'{"_id":"7","name":"x"}'))


@pytest.mark.parametrize(
    ("key", "text"), [("Łódź".encode(), "Łódź"), (b"\xff\x00", "0xff00"), (b"\x00\x07", "0x0007"), (b"", "")]
)
def test_equal_keys_have_equal_texts(key: bytes, text: str) -> None:
    assert decode(message(key=key, event_id=str(ID))).key == text


def test_headers_that_are_no_text_are_left_out() -> None:
    binary = message(event_id=str(ID))
    binary = binary._replace(headers=[*binary.headers, ("blob", b"\xff"), ("region", b"eu")])
    assert decode(binary).headers == {"region": "eu"}


def test_an_unreadable_message_can_be_kept_and_read_again() -> None:
    bad = message(b"{", content__type="application/cloudevents+json", region="eu")
    event = unreadable(bad._replace(headers=[*bad.headers, ("blob", b"\xff"), ("nul", b"a\0b")]))
    assert (event.type, event.topic, event.key, event.payload) == (UNREADABLE_TYPE, "cards", "7", b"{")
    assert event.id == unreadable(bad).id == stable_id("place", "cards", "cards/0/3")
    again = message_of(event, LANE, 0)
    assert (again.topic, again.key, again.body, list(again.headers)) == ("cards", b"7", b"{", list(bad.headers))
    with pytest.raises(Reject, match="is not JSON"):
        decode(again)


_NAMES = st.sampled_from([
    "event_id", "id", "message_id", "event_type", "type", "tenant", "content_type", "content-type", "aggregate_id",
    "aggregateId", "aggregate_version", "schema_id", "trace_id", "event_key", "region", "traceparent",
])  # fmt: skip
_VALUES = st.sampled_from(["", "7", "x", str(ID), "text/plain", "application/json", "é"])
_HEADERS = st.lists(st.tuples(_NAMES, _VALUES), max_size=9)


@given(_HEADERS, st.sampled_from([None, b"k"]), st.sampled_from([None, "image/png"]))
@example([("event_id", ""), ("id", "7"), ("id", "x"), ("type", "a"), ("event_type", "b")], None, None)
def test_headers_mean_the_same_in_any_order_and_number(
    pairs: list[tuple[str, str]], key: bytes | None, content_type: str | None
) -> None:
    headers = dict(pairs)  # of a name that comes twice, the last value
    own = {name: value for name, value in headers.items() if name in ("region", "traceparent")}
    version = headers.get("aggregate_version")
    raw = [(name, value.encode()) for name, value in pairs]
    made = Message(LANE, 3, "cards", key, b"{}", raw, content_type, None, AT)
    if version is not None and version != "7":
        with pytest.raises(Reject, match="aggregate version"):
            make_decoder(ids="place")(made)
        return
    event = make_decoder(ids="place")(made)

    def last(*names: str) -> str | None:
        """Of the names that are there, the value of the one that comes last."""
        return next((value for name, value in reversed(headers.items()) if name in names), None)

    id_text = headers.get("event_id") or headers.get("id") or headers.get("message_id")
    assert event.id == (
        stable_id("place", "cards", "cards/0/3")
        if not id_text
        else ID
        if id_text == str(ID)
        else stable_id("message", "cards", id_text)
    )
    assert event.type == (last("event_type", "type") or "message")
    assert event.tenant == (headers.get("tenant") or "default")
    assert event.aggregate_id == last("aggregate_id", "aggregateId")
    assert event.aggregate_version == (None if version is None else 7)
    assert event.schema_id == headers.get("schema_id")
    assert event.key == (headers.get("event_key") if key is None else "k")
    named = content_type or headers.get("content-type") or headers.get("content_type")
    assert event.content_type == (named or "application/json")
    assert event.headers == own
