"""What goes over the wire for an event: key, value and headers. Pure code, no I/O.

An envelope is a function ``Event -> Message``. The factories below make one and compose it with a header
builder, a function ``Event -> list of (name, bytes)``, which users replace or extend::

    raw(lambda event: [*default_headers(event), ("region", b"eu")])
"""

import difflib
import json
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from pillarbox.errors import ConfigError, Reject
from pillarbox.event import Event

Headers: TypeAlias = list[tuple[str, bytes]]
HeaderBuilder: TypeAlias = Callable[[Event], Headers]


class Message(NamedTuple):
    """One message as a broker gets it."""

    key: bytes | None
    value: bytes | None
    headers: Headers


Envelope: TypeAlias = Callable[[Event], Message]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# An event's own header must not pose as one of these: consumers de-duplicate on event_id.
RESERVED: Final = frozenset(
    {
        "event_id",
        "event_type",
        "tenant",
        "occurred_at",
        "content_type",
        "aggregate_type",
        "aggregate_id",
        "aggregate_version",
        "schema_id",
        "schema_version",
        "trace_id",
    }
)


@lru_cache(maxsize=1024)
def _repeating(
    type_: str,
    tenant: str,
    content_type: str,
    aggregate_type: str | None,
    schema_id: str | None,
    schema_version: str | None,
) -> tuple[tuple[str, bytes], ...]:
    # What most events of an application share is encoded once: it would be half of the cost of an event.
    values = {
        "event_type": type_,
        "tenant": tenant,
        "content_type": content_type,
        "aggregate_type": aggregate_type,
        "schema_id": schema_id,
        "schema_version": schema_version,
    }
    return tuple((name, value.encode()) for name, value in values.items() if value is not None)


@lru_cache(maxsize=4096)
def _second(days: int, seconds: int) -> bytes:
    return (_EPOCH + timedelta(days, seconds)).strftime("%Y-%m-%dT%H:%M:%S").encode()


def iso_instant(instant: datetime) -> bytes:
    """ISO 8601 in UTC with microseconds. Events of one second share most of it, and ``isoformat`` is slow."""
    since = instant - _EPOCH
    return b"%b.%06d+00:00" % (_second(since.days, since.seconds), since.microseconds)


def event_headers(event: Event) -> Headers:
    """The event's own headers, and nothing else."""
    return [(name, value.encode()) for name, value in event.headers.items()]


def default_headers(event: Event) -> Headers:
    """Identity, type, tenant, aggregate, schema, times as ISO 8601 and trace; then the event's own headers.

    Absent values give no header. ``trace_id`` comes from the event's ``traceparent`` header. An own header
    with one of these names is left out.
    """
    # Unpacked at once: attribute by attribute would cost more than all that is encoded here.
    # fmt: off
    (id_, _, tenant, _, type_, aggregate_type, aggregate_id, version, _, _, _,
     content_type, schema_id, schema_version, _, _, _, occurred_at, own, _, _, _) = event
    # fmt: on
    headers = [
        ("event_id", str(id_).encode()),
        *_repeating(type_, tenant, content_type, aggregate_type, schema_id, schema_version),
        ("occurred_at", iso_instant(occurred_at)),
    ]
    if aggregate_id is not None:
        headers.append(("aggregate_id", aggregate_id.encode()))
    if version is not None:
        headers.append(("aggregate_version", b"%d" % version))
    if own:
        trace = own.get("traceparent", "").split("-")
        if len(trace) >= 4 and len(trace[1]) == 32:
            headers.append(("trace_id", trace[1].encode()))
        headers += [(name, value.encode()) for name, value in own.items() if name not in RESERVED]
    return headers


def raw(headers: HeaderBuilder = default_headers) -> Envelope:
    """The payload byte for byte; everything else stands in the headers."""
    make = tuple.__new__

    def envelope(event: Event) -> Message:
        key = event.key
        # Half the cost of calling the class; the fields are those of Message, in its order.
        return make(Message, (None if key is None else key.encode(), event.payload, headers(event)))

    return envelope


def legacy(headers: HeaderBuilder = default_headers) -> Envelope:
    """The JSON document ``{"_id", "payload", "created_at"}``, with the payload's own bytes inside.

    A payload that is not JSON in UTF-8 by its content type stands as base64 in ``payload_base64`` in place of
    ``payload``: readers of the known field never meet a string where they expect a document. That a JSON
    payload is well-formed is the writer's promise; only an empty one is noticed here, and refused.
    """

    def envelope(event: Event) -> Message:
        field, payload = _json_field(event, "payload", "payload_base64")
        created_at = iso_instant(event.created_at)
        value = b'{"_id":"%b","%b":%b,"created_at":"%b"}' % (
            str(event.id).encode(),
            field,
            payload,
            created_at,
        )
        return Message(_key(event), value, headers(event))

    return envelope


def cloudevents_binary(source: str, headers: HeaderBuilder = event_headers) -> Envelope:
    """CloudEvents 1.0, binary mode of the Kafka binding: attributes as ``ce_`` headers, the payload as it is.

    source: the ``source`` attribute, a URI reference such as ``/shop/orders``.
    """
    _check_source(source)

    def envelope(event: Event) -> Message:
        attributes = [("ce_" + name, value.encode()) for name, value in _attributes(event, source)]
        attributes.append(("content-type", event.content_type.encode()))
        return Message(_key(event), event.payload, attributes + headers(event))

    return envelope


def cloudevents_structured(source: str, headers: HeaderBuilder = event_headers) -> Envelope:
    """CloudEvents 1.0, structured mode: one JSON document with the payload inside.

    A JSON payload stands in ``data``, byte for byte; any other in ``data_base64``; an empty one in neither.
    source: the ``source`` attribute, a URI reference such as ``/shop/orders``.
    """
    _check_source(source)
    mode = ("content-type", b"application/cloudevents+json; charset=UTF-8")

    def envelope(event: Event) -> Message:
        attributes = dict(_attributes(event, source))
        attributes["datacontenttype"] = event.content_type
        value = json.dumps(attributes, ensure_ascii=False, separators=(",", ":")).encode()
        if event.payload:
            field, data = _json_field(event, "data", "data_base64")
            value = b'%b,"%b":%b}' % (value[:-1], field, data)
        return Message(_key(event), value, [mode, *headers(event)])

    return envelope


ENVELOPES: Final = ("raw", "legacy", "cloudevents", "cloudevents_binary", "cloudevents_structured")


def envelope_named(name: str, *, headers: HeaderBuilder | None = None, source: str = "/pillarbox") -> Envelope:
    """The envelope that a setting names; ``cloudevents`` is the binary mode.

    headers: none given: the default of that envelope.
    """
    match name:
        case "raw":
            return raw(headers or default_headers)
        case "legacy":
            return legacy(headers or default_headers)
        case "cloudevents" | "cloudevents_binary":
            return cloudevents_binary(source, headers or event_headers)
        case "cloudevents_structured":
            return cloudevents_structured(source, headers or event_headers)
    close = difflib.get_close_matches(name, ENVELOPES, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(ENVELOPES)}"
    raise ConfigError(f"envelope={name!r} is unknown; {hint}")


def _key(event: Event) -> bytes | None:
    return None if event.key is None else event.key.encode()


def _check_source(source: str) -> None:
    if not source:
        raise ConfigError("source='' is not allowed by CloudEvents; name the producer, for instance '/shop/orders'")


def _attributes(event: Event, source: str) -> list[tuple[str, str]]:
    attributes = [
        ("specversion", "1.0"),
        ("id", str(event.id)),
        ("source", source),
        ("type", event.type),
        ("time", event.occurred_at.isoformat()),
        ("tenant", event.tenant),
    ]
    if event.aggregate_id is not None:
        attributes.append(("subject", event.aggregate_id))
    if event.aggregate_type is not None:
        attributes.append(("aggregatetype", event.aggregate_type))
    if event.aggregate_version is not None:
        attributes.append(("aggregateversion", str(event.aggregate_version)))
    if event.key is not None:
        attributes.append(("partitionkey", event.key))
    if event.schema_id is not None:
        # dataschema must be a URI; a registry's bare number would make the event invalid.
        attributes.append(("dataschema" if ":" in event.schema_id else "schemaid", event.schema_id))
    if event.schema_version is not None:
        attributes.append(("schemaversion", event.schema_version))
    attributes += [(name, event.headers[name]) for name in ("traceparent", "tracestate") if name in event.headers]
    return attributes


@lru_cache(maxsize=256)
def _is_json(content_type: str) -> bool:
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charset = next((each.removeprefix("charset=").strip('"') for each in parameters if "charset=" in each), "utf-8")
    # A document has one encoding: JSON in another one can only stand in it as base64.
    return (kind in ("application/json", "text/json") or kind.endswith("+json")) and charset in (
        "utf-8",
        "us-ascii",
    )


def _json_field(event: Event, plain: str, encoded: str) -> tuple[bytes, bytes]:
    if not _is_json(event.content_type):
        return encoded.encode(), b'"%b"' % b64encode(event.payload)
    if not event.payload or event.payload.isspace():
        raise Reject(f"the payload is empty, which is not {event.content_type}; write null, or another content type")
    return plain.encode(), event.payload
