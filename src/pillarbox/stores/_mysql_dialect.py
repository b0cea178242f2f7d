from datetime import UTC, datetime
from typing import Any
from uuid import UUID


def cell(value: Any) -> Any:
    """A parameter as every driver takes it: ids as bytes, instants in UTC without a zone."""
    if isinstance(value, UUID):
        return value.bytes
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None)
    return value
