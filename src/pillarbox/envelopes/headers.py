"""Header builders: functions from an event to the headers of its message.

Users replace or extend them::

    Envelope(lambda event: [*default_headers(event), ("region", b"eu")])
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, TypeAlias
from uuid import UUID

from pillarbox.event import Event

# Values are UTF-8. Kafka takes them as they are; a broker with text headers decodes them.
Headers: TypeAlias = list[tuple[str, bytes]]
HeaderBuilder: TypeAlias = Callable[[Event], Headers]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# An event's own header must not pose as one of these: consumers de-duplicate on event_id.
RESERVED: Final = frozenset({
    "event_id", "event_type", "tenant", "occurred_at", "content_type", "aggregate_type", "aggregate_id",
    "aggregate_version", "schema_id", "schema_version", "trace_id",
})  # fmt: skip


@lru_cache(maxsize=1024)
def _repeating(
    type_: str,
    tenant: str,
    content_type: str,
    aggregate_type: str | None,
    schema_id: str | None,
    schema_version: str | None,
) -> tuple[tuple[str, bytes], ...]:
    # Most events of an application share these values. Encoding them each time would be half of an event's cost.
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
    """ISO 8601 in UTC with microseconds. The text of a second is cached, because ``isoformat`` is slow."""
    since = instant - _EPOCH
    return b"%b.%06d+00:00" % (_second(since.days, since.seconds), since.microseconds)


def id_text(id_: UUID) -> str:
    """The id as ``str`` writes it, in half of the time."""
    if type(id_) is not UUID:
        return str(id_)  # asyncpg has a class of its own, written in C
    text = id_.bytes.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def event_headers(event: Event) -> Headers:
    """The event's own headers, and nothing else."""
    return [(name, value.encode()) for name, value in event.headers.items()]


def default_headers(event: Event) -> Headers:
    """Identity, type, tenant, aggregate, schema, times as ISO 8601 and trace; then the event's own headers.

    Absent values give no header. ``trace_id`` comes from the event's ``traceparent`` header. An own header
    with one of these names is left out.
    """
    # Unpacked at once: reading the fields one by one would cost more than encoding them.
    # fmt: off
    (id_, _, tenant, _, type_, aggregate_type, aggregate_id, version, _, _, _,
     content_type, schema_id, schema_version, _, _, _, occurred_at, own, _, _, _) = event
    # fmt: on
    headers = [
        ("event_id", id_text(id_).encode()),
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
