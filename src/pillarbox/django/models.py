"""Models that read the tables of the outbox. Only Pillarbox writes to them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import models

from pillarbox.django.configuration import configuration
from pillarbox.errors import ConfigError
from pillarbox.event import Status
from pillarbox.uuids import uuid_of


def _table(name: str) -> str:
    names = configuration().names
    table = f"{names.prefix}_{name}"
    return f'"{names.schema}"."{table}"' if names.schema else table


if TYPE_CHECKING:
    _Field = models.Field[Any, Any]
    _Text = models.Field[str, str]
    _Number = models.Field[int, int]
    _Instant = models.Field[datetime, datetime]
    _MaybeText = models.Field[str | None, str | None]
    _MaybeNumber = models.Field[int | None, int | None]
    _MaybeInstant = models.Field[datetime | None, datetime | None]
    _Data = models.Field[bytes, bytes]
else:
    _Field = models.Field  # generic for type checkers only


class IdField(_Field):
    """An event's id in the form that each database has: uuid, binary(16), or text."""

    description = "An event's id"

    def db_type(self, connection: Any) -> str:
        return {"postgresql": "uuid", "mysql": "binary(16)"}.get(connection.vendor, "text")

    def to_python(self, value: Any) -> Any:
        if value is None or isinstance(value, UUID):
            return value
        try:
            return UUID(str(value))
        except ValueError:
            raise ValidationError("“%(value)s” is not an event's id.", params={"value": value}) from None

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return uuid_of(value) if isinstance(value, bytes) else self.to_python(value)

    def get_prep_value(self, value: Any) -> Any:
        return self.to_python(super().get_prep_value(value))

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        value = self.to_python(value)
        if value is None or connection.vendor == "postgresql":
            return value
        return value.bytes if connection.vendor == "mysql" else str(value)


class _Row(models.Model):
    """The columns that an event and its dead letter share."""

    # Unique with the stream only: the same event may be in several streams.
    id = IdField(primary_key=True)
    seq: _Number = models.BigIntegerField()
    stream: _Text = models.CharField(max_length=100)
    tenant: _Text = models.CharField(max_length=100)
    topic: _Text = models.CharField(max_length=249)
    type: _Text = models.CharField(max_length=255)
    key: _MaybeText = models.CharField(max_length=255, null=True)
    aggregate_type: _MaybeText = models.CharField(max_length=255, null=True)
    aggregate_id: _MaybeText = models.CharField(max_length=255, null=True)
    aggregate_version: _MaybeNumber = models.BigIntegerField(null=True)
    routing_key: _MaybeText = models.CharField(max_length=255, null=True)
    content_type: _Text = models.CharField(max_length=255)
    schema_id: _MaybeText = models.CharField(max_length=255, null=True)
    schema_version: _MaybeText = models.CharField(max_length=100, null=True)
    attempts: _Number = models.IntegerField()
    max_attempts: _MaybeNumber = models.IntegerField(null=True)
    created_at: _Instant = models.DateTimeField()
    occurred_at: _MaybeInstant = models.DateTimeField(null=True)
    available_at: _MaybeInstant = models.DateTimeField(null=True)
    headers: _MaybeText = models.TextField(null=True)
    errors: _MaybeText = models.TextField(null=True)
    payload: _Data = models.BinaryField()

    class Meta:
        abstract = True
        managed = False

    def __str__(self) -> str:
        return f"{self.type} {self.id}"

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError("only Pillarbox writes to its tables; write events with outbox.add")

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "only Pillarbox deletes from its tables; it prunes published events, and "
            "`manage.py pillarbox dead discard` gives up dead ones"
        )


class Event(_Row):
    """An event that waits or was published."""

    status: _Text = models.CharField(
        max_length=10, choices=[(each.value, each.value) for each in Status if each is not Status.DEAD]
    )
    next_attempt_at: _MaybeInstant = models.DateTimeField(null=True)
    published_at: _MaybeInstant = models.DateTimeField(null=True)
    last_error: _MaybeText = models.TextField(null=True)
    last_error_at: _MaybeInstant = models.DateTimeField(null=True)

    class Meta(_Row.Meta):
        abstract = False
        db_table = _table("event")
        default_permissions = ("view",)
        permissions = (("view_payload", "Can view the payloads of events"),)


class DeadLetter(_Row):
    """An event that is not tried again."""

    consumer: _Text = models.CharField(max_length=100)
    error: _Text = models.TextField()
    died_at: _Instant = models.DateTimeField()
    replay_at: _MaybeInstant = models.DateTimeField(null=True)

    class Meta(_Row.Meta):
        abstract = False
        db_table = _table("dead_letter")
        default_permissions = ("view",)
        permissions = (
            ("replay_deadletter", "Can replay dead letters"),
            ("discard_deadletter", "Can discard dead letters"),
        )


PAYLOAD: Final = "pillarbox.view_payload"
