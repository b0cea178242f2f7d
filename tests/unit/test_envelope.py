import json
from base64 import b64decode
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from pillarbox.envelopes import (
    Binding,
    CloudEvents,
    Envelope,
    Legacy,
    Message,
    StructuredCloudEvents,
    default_headers,
    envelope_named,
    kafka,
    rabbitmq,
)
from pillarbox.errors import ConfigError, Reject
from pillarbox.event import NO_HEADERS, Event, Status

ID = UUID("0192f0c1-0a0b-7c0d-8e0f-000000000007")
OCCURRED_AT = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
CREATED_AT = datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC)
# Spaces, a repeated name and an escape: what parsing and writing again would change.
PAYLOAD = b'{"n": 1.0,  "n": 1e2, "s": "\\u00e9"}'
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def an_event(**changes: Any) -> Event:
    fields: dict[str, Any] = {
        "id": ID,
        "seq": 1,
        "stream": "default",
        "tenant": "acme",
        "topic": "",
        "type": "order.created",
        "aggregate_type": None,
        "aggregate_id": None,
        "aggregate_version": None,
        "key": "k-é",
        "routing_key": None,
        "payload": PAYLOAD,
        "content_type": "application/json",
        "schema_id": None,
        "schema_version": None,
        "occurred_at": OCCURRED_AT,
        "created_at": CREATED_AT,
        "attempts": 0,
        "max_attempts": None,
        "status": Status.PENDING,
        "headers": NO_HEADERS,
    }
    return Event(**{**fields, **changes})


FULL = an_event(
    aggregate_type="order",
    aggregate_id="7",
    aggregate_version=3,
    schema_id="urn:order",
    schema_version="2",
    headers={"traceparent": TRACE, "region": "eu"},
)


def test_default_headers_leave_out_what_is_absent() -> None:
    assert dict(default_headers(an_event())) == {
        "event_id": b"0192f0c1-0a0b-7c0d-8e0f-000000000007",
        "event_type": b"order.created",
        "tenant": b"acme",
        "content_type": b"application/json",
        "occurred_at": b"2026-01-02T03:04:05.000678+00:00",
    }


def test_default_headers_carry_aggregate_schema_trace_and_own_headers() -> None:
    headers = dict(default_headers(FULL))
    assert headers["aggregate_type"] == b"order"
    assert headers["aggregate_id"] == b"7"
    assert headers["aggregate_version"] == b"3"
    assert headers["schema_id"] == b"urn:order"
    assert headers["schema_version"] == b"2"
    assert headers["trace_id"] == b"0af7651916cd43dd8448eb211c80319c"
    assert headers["traceparent"] == TRACE.encode()
    assert headers["region"] == b"eu"


def test_a_malformed_traceparent_gives_no_trace_id() -> None:
    assert "trace_id" not in dict(default_headers(an_event(headers={"traceparent": "nonsense"})))


def test_an_own_header_cannot_pose_as_the_identity() -> None:
    headers = default_headers(an_event(headers={"event_id": "forged", "tenant": "other"}))
    assert [value for name, value in headers if name == "event_id"] == [str(ID).encode()]
    assert [value for name, value in headers if name == "tenant"] == [b"acme"]


def test_the_header_builder_can_be_extended_and_replaced() -> None:
    extended = kafka(Envelope(lambda event: [*default_headers(event), ("x", b"y")]))(an_event())
    assert extended.headers == [*default_headers(an_event()), ("x", b"y")]
    assert kafka(Envelope(lambda event: [("only", event.type.encode())]))(an_event()).headers == [
        ("only", b"order.created")
    ]


def test_raw_delivers_the_payload_byte_for_byte() -> None:
    message = kafka(Envelope())(an_event())
    assert isinstance(message, Message)
    assert message == Message("k-é".encode(), PAYLOAD, default_headers(an_event()))
    assert kafka(Envelope())(an_event(key=None, payload=b"")).key is None
    assert kafka(Envelope())(an_event(payload=b"")).value == b""


def test_legacy_splices_the_payload_untouched() -> None:
    message = kafka(Legacy())(an_event())
    assert message.value is not None
    assert b'"payload":' + PAYLOAD + b"," in message.value
    document = json.loads(message.value)
    assert list(document) == ["_id", "payload", "created_at"]
    assert document["_id"] == str(ID)
    assert document["created_at"] == "2026-01-02T03:04:06.000000+00:00"
    assert message.key == "k-é".encode()
    assert ("event_type", b"order.created") in message.headers


@pytest.mark.parametrize("content_type", ["application/avro", "application/json; charset=utf-16", "text/plain"])
def test_legacy_puts_what_is_not_json_into_another_field(content_type: str) -> None:
    document = json.loads(kafka(Legacy())(an_event(content_type=content_type, payload=b"\x00\xff")).value or b"")
    assert list(document) == ["_id", "payload_base64", "created_at"]
    assert b64decode(document["payload_base64"]) == b"\x00\xff"


@pytest.mark.parametrize("content_type", ["application/vnd.shop+json", 'Application/JSON; charset="UTF-8"'])
def test_kinds_of_json_are_embedded(content_type: str) -> None:
    document = json.loads(kafka(Legacy())(an_event(content_type=content_type)).value or b"")
    assert document["payload"] == json.loads(PAYLOAD)


def test_legacy_refuses_empty_json() -> None:
    with pytest.raises(Reject, match="empty"):
        kafka(Legacy())(an_event(payload=b" "))


def test_cloudevents_binary_follows_the_kafka_binding() -> None:
    message = kafka(CloudEvents("/shop"))(FULL)
    assert message.value == PAYLOAD
    assert message.key == "k-é".encode()
    assert dict(message.headers) == {
        "ce_specversion": b"1.0",
        "ce_id": str(ID).encode(),
        "ce_source": b"/shop",
        "ce_type": b"order.created",
        "ce_time": b"2026-01-02T03:04:05.000678+00:00",
        "ce_subject": b"7",
        "ce_tenant": b"acme",
        "ce_aggregatetype": b"order",
        "ce_aggregateversion": b"3",
        "ce_partitionkey": "k-é".encode(),
        "ce_dataschema": b"urn:order",
        "ce_schemaversion": b"2",
        "ce_traceparent": TRACE.encode(),
        "content-type": b"application/json",
        "traceparent": TRACE.encode(),
        "region": b"eu",
    }


@pytest.mark.parametrize("name", ["ce_source", "CE_SOURCE", "ce-id", "Ce_Anything", "content-type", "Content-Type"])
@pytest.mark.parametrize("envelope", [CloudEvents("/shop"), StructuredCloudEvents("/shop")])
def test_an_own_header_cannot_pose_as_an_attribute(envelope: Envelope, name: str) -> None:
    own = {name: "forged", "region": "eu", "center": "a"}
    message = kafka(envelope)(an_event(headers=own))
    assert message == kafka(envelope)(an_event(headers={"region": "eu", "center": "a"}))
    assert dict(message.headers)["region"] == b"eu"


def test_a_header_builder_cannot_pose_as_an_attribute_either() -> None:
    envelope = CloudEvents("/shop", lambda event: [("ce_source", b"/other"), ("region", b"eu")])
    headers = kafka(envelope)(an_event()).headers
    assert [value for name, value in headers if name == "ce_source"] == [b"/shop"]
    assert ("region", b"eu") in headers


def test_a_broker_with_text_headers_needs_a_small_binding() -> None:
    http = CloudEvents("/shop").header_builder(Binding("ce-", content_type="Content-Type"))
    headers = {name: value.decode() for name, value in http(FULL)}
    assert headers["ce-source"] == "/shop"
    assert headers["Content-Type"] == "application/json"
    assert headers["region"] == "eu"
    amqp = StructuredCloudEvents("/shop")
    assert dict(amqp.header_builder(Binding("ce-", content_type=None))(an_event())) == {}
    assert amqp.content_type(FULL) == "application/cloudevents+json; charset=UTF-8"


@pytest.mark.parametrize("key", ["7", None])
def test_an_own_header_cannot_pose_as_the_key_on_a_broker_without_keys(key: str | None) -> None:
    message = rabbitmq(envelope_named("raw", headers=None, source="/shop"))
    assert message(an_event(key=key, headers={"event_key": "8"})).headers.get("event_key") == key


def test_an_envelope_of_ones_own() -> None:
    class Framed(Envelope):
        def body(self, event: Event) -> bytes:
            return b"\x00" + event.payload

    assert kafka(Framed())(an_event()) == Message("k-é".encode(), b"\x00" + PAYLOAD, default_headers(an_event()))


def test_the_content_type_is_that_of_the_body() -> None:
    event = an_event(content_type="text/plain", payload=b"hello")
    assert Envelope().content_type(event) == CloudEvents("/s").content_type(event) == "text/plain"
    assert Legacy().content_type(event) == "application/json"


def test_the_id_is_written_as_python_does() -> None:
    for number in (0, 1, 2**127, 2**128 - 1, ID.int):
        event = an_event(id=UUID(int=number))
        assert dict(default_headers(event))["event_id"] == str(event.id).encode()


def test_cloudevents_dataschema_is_only_a_uri() -> None:
    headers = dict(kafka(CloudEvents("/shop"))(an_event(schema_id="17")).headers)
    assert headers["ce_schemaid"] == b"17"
    assert "ce_dataschema" not in headers


def test_cloudevents_structured_embeds_json_untouched() -> None:
    message = kafka(StructuredCloudEvents("/shop"))(FULL)
    assert message.value is not None
    assert message.value.endswith(b',"data":' + PAYLOAD + b"}")
    document = json.loads(message.value)
    assert document["specversion"] == "1.0"
    assert document["id"] == str(ID)
    assert document["source"] == "/shop"
    assert document["subject"] == "7"
    assert document["partitionkey"] == "k-é"
    assert document["datacontenttype"] == "application/json"
    assert dict(message.headers)["content-type"] == b"application/cloudevents+json; charset=UTF-8"


def test_cloudevents_structured_encodes_other_content() -> None:
    event = an_event(content_type="application/octet-stream", payload=b"\x00\xff")
    document = json.loads(kafka(StructuredCloudEvents("/shop"))(event).value or b"")
    assert b64decode(document["data_base64"]) == b"\x00\xff"
    assert "data" not in document


def test_cloudevents_structured_without_content_has_no_data() -> None:
    document = json.loads(kafka(StructuredCloudEvents("/shop"))(an_event(payload=b"")).value or b"")
    assert not {"data", "data_base64"} & set(document)


@pytest.mark.parametrize("make", [CloudEvents, StructuredCloudEvents])
def test_cloudevents_needs_a_source(make: Any) -> None:
    with pytest.raises(ConfigError, match="source=''"):
        make("")


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("raw", Envelope()),
        ("legacy", Legacy()),
        ("cloudevents", CloudEvents("/s")),
        ("cloudevents_binary", CloudEvents("/s")),
        ("cloudevents_structured", StructuredCloudEvents("/s")),
    ],
)
def test_an_envelope_by_name(name: str, same: Envelope) -> None:
    assert kafka(envelope_named(name, source="/s"))(FULL) == kafka(same)(FULL)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"envelope='cloudevent' is unknown; did you mean 'cloudevents'\?"):
        envelope_named("cloudevent")
    with pytest.raises(ConfigError, match="use one of: raw, legacy"):
        envelope_named("xyz")
