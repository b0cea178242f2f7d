"""Decoders: what we and others write becomes the same event."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pillarbox import stable_id
from pillarbox.conformance.events import make_event
from pillarbox.consumer.decoder import checked, decode, make_decoder
from pillarbox.consumer.unreadable import UNREADABLE_TYPE, message_of, unreadable, with_id_of_letter
from pillarbox.envelopes import ENVELOPES, envelope_named, kafka
from pillarbox.errors import ConfigError, Reject
from pillarbox.event import Event
from pillarbox.source import Lane, Message

LANE = Lane("cards/0")
ID = UUID("01890000-0000-7000-8000-000000000001")
AT = datetime(2026, 3, 1, 12, 30, 15, 250_000, UTC)
STRUCTURED = {"content__type": "application/cloudevents+json"}
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
        (STRUCTURED, b"{", "is not JSON"),
        (STRUCTURED, b"[]", "no JSON object"),
        (STRUCTURED, b'{"id":"1","data_base64":"*"}', "is not base64"),
        (STRUCTURED, b'{"id":"1","time":"soon"}', "not ISO 8601"),
        (STRUCTURED, b'{"id":"1","type":["a"]}', "attribute 'type' of the CloudEvent is no text"),
        (STRUCTURED, b'{"id":"1","partitionkey":{"a":1}}', "attribute 'partitionkey' of the CloudEvent is no text"),
        (STRUCTURED, b'{"id":"1","aggregateversion":Infinity}', "attribute 'aggregateversion' of the CloudEvent is no"),
        (STRUCTURED, b'{"id":"1","aggregateversion":1.5}', "attribute 'aggregateversion' of the CloudEvent is no text"),
        (STRUCTURED, b'{"id":"1","traceparent":true}', "attribute 'traceparent' of the CloudEvent is no text"),
        (STRUCTURED, b'{"id":{"a":1}}', "attribute 'id' of the CloudEvent is no text"),
        (STRUCTURED, b'{"id":"\\ud800"}', "contains a lone surrogate, which is no character; correct its producer"),
        (STRUCTURED, b'{"id":"1","note":"\\ud800"}', "an attribute of the CloudEvent contains a lone surrogate"),
        (STRUCTURED, b'{"id":"1","\\ud800":"x"}', "an attribute of the CloudEvent contains a lone surrogate"),
        ({"event_id": "1", "aggregate_version": "x"}, b"", "no whole number"),
        ({"event_id": "1", "aggregate_version": "9" * 20}, b"", "more than 64 bits"),
        ({"event_id": "1", "occurred_at": "9" * 30}, b"", "not ISO 8601"),
        ({"event_id": "1", "occurred_at": "0001-01-01T00:00:00+14:00"}, b"", "in the year 1; correct its producer"),
        ({}, b'{"_id":"7","payload":' + b"[" * 100_000, "has no id"),
    ],
)
def test_a_message_that_cannot_be_read_says_why(headers: dict[str, str], body: bytes, said: str) -> None:
    with pytest.raises(Reject, match=said):
        decode(message(body, headers))


def test_a_whole_number_of_a_structured_cloud_event_is_read_as_text() -> None:
    body = b'{"id":7,"type":"t","subject":8,"partitionkey":9,"aggregateversion":3}'
    found = decode(message(body, STRUCTURED))
    assert found.id == stable_id("message", "cards", "7")
    assert (found.aggregate_id, found.key, found.aggregate_version) == ("8", "7", 3)
    assert decode(message(body, STRUCTURED, key=None)).key == "9"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"type": ["a"]}, "type is of type list; pass text"),
        ({"key": 7}, "key is of type int; pass text"),
        ({"tenant": None}, "tenant is of type NoneType; pass text"),
        ({"schema_id": "\udcff"}, "schema_id contains a lone surrogate"),
        ({"max_attempts": "3"}, "max_attempts is of type str; pass a whole number from 1"),
        ({"max_attempts": 0}, "max_attempts is 0; pass a whole number from 1"),
        ({"aggregate_version": 2**63}, f"aggregate_version is {2**63}; pass a whole number"),
        ({"headers": [("a", "b")]}, "headers are of type list; pass a mapping from str to str"),
        ({"headers": {"a": 1}}, "header 'a' is of type int; pass text"),
        ({"id": str(ID)}, "id is of type str; pass a uuid.UUID"),
        ({"payload": "text"}, "the payload of an event is of type str; pass bytes"),
        ({"occurred_at": AT.replace(tzinfo=None)}, "occurred_at is no aware datetime"),
    ],
)
def test_an_event_that_cannot_be_is_refused_in_place_of_its_consumer(fields: dict[str, Any], said: str) -> None:
    """A function of the user may take a value out of a message as it is."""
    own = checked(lambda given: decode(given)._replace(**fields))
    with pytest.raises(Reject, match=re.escape(f"the decoder made an event that cannot be: {said}")):
        own(message(event_id=str(ID)))


def test_a_foreign_event_may_be_longer_than_what_we_write() -> None:
    long: dict[str, Any] = {"type": "t" * 3000, "key": "k" * 3000, "headers": {"a": "x" * 100_000, "\0": "\0"}}
    assert checked(lambda given: decode(given)._replace(**long))(message(event_id=str(ID))).key == "k" * 3000


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
    again = message_of(event)
    assert (again.topic, again.key, again.body, list(again.headers)) == ("cards", b"7", b"{", list(bad.headers))
    with pytest.raises(Reject, match="is not JSON"):
        decode(again)


def test_an_unreadable_message_keeps_the_id_that_the_broker_has_of_it() -> None:
    event = unreadable(message(b"{}", message_id="of the header")._replace(message_id="of the broker"))
    assert event.headers == {"message_id": "of the header"}
    event = unreadable(message(b"{}")._replace(message_id="of the broker"))
    assert message_of(event).message_id == "of the broker"
    assert decode(message_of(event)).id == stable_id("message", "cards", "of the broker")


def test_a_message_that_can_be_read_later_has_the_id_of_its_own_place() -> None:
    by_place, places = make_decoder(ids="place"), ("cards/0/3", "cards/0/4")
    letters = [unreadable(message(b"{")._replace(place=place)) for place in places]
    found = [with_id_of_letter(by_place(message_of(letter)), letter).id for letter in letters]
    assert found == [stable_id("place", "cards", place) for place in places]
    named = unreadable(message(b"{", event_id=str(ID)))
    assert with_id_of_letter(by_place(message_of(named)), named).id == ID


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
