"""CloudEvents 1.0: the binary and the structured mode."""

import json
from functools import lru_cache

from pillarbox.envelopes.envelope import Binding, Envelope, json_field
from pillarbox.envelopes.headers import HeaderBuilder, Headers, event_headers, id_text
from pillarbox.errors import ConfigError
from pillarbox.event import Event


class CloudEvents(Envelope):
    """Binary mode: the payload as it is, the attributes as headers.

    The event's own headers with the name of an attribute or of the content type are left out (in any case, for any
    broker): consumers would take them for the envelope's. source: the ``source`` attribute, a URI reference such as
    ``/shop/orders``.
    """

    def __init__(self, source: str, headers: HeaderBuilder = event_headers) -> None:
        if not source:
            raise ConfigError("source='' is not allowed by CloudEvents; name the producer, for instance '/shop/orders'")
        super().__init__(headers)
        self._source = source

    def attributes(self, event: Event) -> list[tuple[str, str]]:
        """The event's attributes by their names in the specification; unknown optional ones are left out."""
        attributes = [
            ("specversion", "1.0"),
            ("id", id_text(event.id)),
            ("source", self._source),
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

    def header_builder(self, binding: Binding) -> HeaderBuilder:
        prefix, type_header = binding
        attributes, content_type, others = self.header_attributes, self.content_type, self.headers

        def build(event: Event) -> Headers:
            headers = [(prefix + name, value.encode()) for name, value in attributes(event)]
            if type_header is not None:
                headers.append((type_header, content_type(event).encode()))
            headers += [header for header in others(event) if not _is_reserved(header[0])]
            return headers

        return build

    def header_attributes(self, event: Event) -> list[tuple[str, str]]:
        """The attributes that stand in headers."""
        return self.attributes(event)


class StructuredCloudEvents(CloudEvents):
    """Structured mode: one JSON document with the attributes and the payload.

    A JSON payload stands in ``data``, byte for byte; any other in ``data_base64``; an empty one in neither.
    """

    def body(self, event: Event) -> bytes:
        attributes = dict(self.attributes(event))
        attributes["datacontenttype"] = event.content_type
        value = json.dumps(attributes, ensure_ascii=False, separators=(",", ":")).encode()
        if event.payload:
            field, data = json_field(event, "data", "data_base64")
            value = b'%b,"%b":%b}' % (value[:-1], field, data)
        return value

    def content_type(self, event: Event) -> str:
        return "application/cloudevents+json; charset=UTF-8"

    def header_attributes(self, event: Event) -> list[tuple[str, str]]:
        return []


@lru_cache(maxsize=1024)
def _is_reserved(name: str) -> bool:
    name = name.lower()
    return name.startswith(("ce_", "ce-")) or name == "content-type"
