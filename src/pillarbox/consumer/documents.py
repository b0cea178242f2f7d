"""Events in CloudEvents, and in JSON documents of the envelope ``legacy``."""

import json
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pillarbox.errors import Reject
from pillarbox.source import Message

CONTENT_TYPES: Final = ("content-type", "content_type")  # headers
CLOUD_IDS: Final = frozenset({"ce_id", "ce-id"})
_FIELDS: Final = {
    "type": "type",
    "tenant": "tenant",
    "subject": "aggregate_id",
    "aggregatetype": "aggregate_type",
    "aggregateversion": "aggregate_version",
    "partitionkey": "key",
    "dataschema": "schema_id",
    "schemaid": "schema_id",
    "schemaversion": "schema_version",
    "time": "occurred_at",
    "datacontenttype": "content_type",
}
_UNUSED: Final = frozenset({"specversion", "id", "source", "data", "data_base64"})
_TRACE: Final = ("traceparent", "tracestate")


def read_cloud(
    message: Message, headers: Mapping[str, str], content_type: str | None, is_structured: bool
) -> tuple[str | None, bytes, dict[str, Any], dict[str, str]] | None:
    """Id, payload, fields and own headers of a CloudEvent; None: it is none."""
    fields: dict[str, Any] = {}
    own: dict[str, str] = {}
    if is_structured:
        id_text, payload = _read_structured(message, fields, own)
        own |= {name: value for name, value in headers.items() if name not in CONTENT_TYPES}
        return id_text, payload, fields, own
    id_text = headers.get("ce_id") or headers.get("ce-id")
    if id_text is None:
        return None
    for name, value in headers.items():
        if name[:3] in ("ce_", "ce-"):
            _attribute(name[3:], value, fields, own)
        elif name not in CONTENT_TYPES:
            own[name] = value
    fields["content_type"] = content_type
    return id_text, message.body, fields, own


def _attribute(name: str, value: Any, fields: dict[str, Any], own: dict[str, str]) -> None:
    if name in _TRACE:
        own[name] = _text(name, value)
    elif (field := _FIELDS.get(name)) is not None:
        fields[field] = _text(name, value)
    elif name not in _UNUSED:
        own[f"ce_{name}"] = value if isinstance(value, str) else json.dumps(value)


def _text(name: str, value: Any) -> str:
    """An attribute that has to be text; JSON may have written a whole number."""
    if isinstance(value, str):
        return value
    if type(value) is not int:
        raise Reject(f"attribute {name!r} of the CloudEvent is no text; correct its producer")
    return str(value)


def _read_structured(message: Message, fields: dict[str, Any], own: dict[str, str]) -> tuple[str | None, bytes]:
    document = _json_object(message.body, "a structured CloudEvent")
    for name, value in document.items():
        if value is not None:
            _attribute(name, value, fields, own)
    if "data_base64" in document:
        payload = _from_base64(document["data_base64"])
    elif "data" not in document:
        payload = b""
    else:
        payload = _member(message.body, "data", document["data"])
    id_ = document.get("id")
    id_text = None if id_ is None else _text("id", id_)
    _check_characters([*fields.values(), *own, *own.values(), id_text or ""])
    return id_text, payload


def _check_characters(texts: Iterable[str]) -> None:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise Reject(
            "an attribute of the CloudEvent contains a lone surrogate, which is no character; correct its producer"
        ) from None


def read_legacy(message: Message, id_text: str | None) -> tuple[str | None, bytes]:
    """Id and payload of a document of the envelope ``legacy``, or of a body that only looks like one."""
    try:
        document = json.loads(message.body)
    except (ValueError, RecursionError):
        return id_text, message.body
    if not isinstance(document, dict) or not document.keys() & {"payload", "payload_base64"}:
        return id_text, message.body
    if "payload_base64" in document:
        return id_text or str(document["_id"]), _from_base64(document["payload_base64"])
    return id_text or str(document["_id"]), _member(message.body, "payload", document["payload"])


def _member(body: bytes, name: str, value: Any) -> bytes:
    """The bytes of a member of a JSON object: as they stand there, if it is where Pillarbox writes it; else written
    anew."""
    text = body.decode()
    marker = f'"{name}":'
    start = text.find(marker)
    if start >= 0:
        start += len(marker)
        begin = start + len(text[start:]) - len(text[start:].lstrip())
        try:
            found, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            found, end = None, begin
        if found == value and end > begin:
            return text[start:end].encode()
    return json.dumps(value, separators=(",", ":")).encode()


def _json_object(body: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise Reject(f"{what} is not JSON; correct its producer") from None
    if not isinstance(document, dict):
        raise Reject(f"{what} is no JSON object; correct its producer")
    return document


def _from_base64(value: Any) -> bytes:
    try:
        return b64decode(value, validate=True)
    except (Base64Error, TypeError, ValueError):
        raise Reject("the payload of the message is not base64; correct its producer") from None
