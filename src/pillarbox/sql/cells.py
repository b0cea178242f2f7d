"""Parameters in the form that a database takes: ids and instants."""

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID


def sqlite_cell(value: Any) -> Any:
    """Ids and instants as text, lists as JSON."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime):
        # The database's own instants have milliseconds: equal instants must be equal texts.
        digits = "microseconds" if value.microsecond % 1000 else "milliseconds"
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", digits)
    if isinstance(value, list):
        return json.dumps([sqlite_cell(item) for item in value])
    return value


def mysql_cell(value: Any) -> Any:
    """Ids as bytes, instants in UTC without a zone."""
    if isinstance(value, UUID):
        return value.bytes
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None)
    return value


def text_id_cell(value: Any) -> Any:
    """Ids as text: not every driver for PostgreSQL takes a UUID."""
    return str(value) if isinstance(value, UUID) else value
