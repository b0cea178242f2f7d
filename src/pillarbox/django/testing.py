"""Helpers for tests of Django projects, for TestCase and TransactionTestCase alike."""

import asyncio
import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import connections

from pillarbox import Event, Handlers, Status
from pillarbox.django.configuration import configuration
from pillarbox.event import NO_HEADERS
from pillarbox.names import TABLES

_KEPT: Final = ("meta", "key_lock")


@contextmanager
def captured_events() -> Iterator[list[Event]]:
    """Collects the events that the block writes, in the order of their writing; they are there when it ends.

    They are read from the outbox, so that those of a block that was rolled back are not among them. In a TestCase they
    are those of the test's own transaction.
    """
    before = _last_seq()
    found: list[Event] = []
    yield found
    found += written_events(after=before)


def written_events(*, after: int = 0) -> Sequence[Event]:
    """The events in the outbox, in the order of their writing. after: only those with a higher ``seq``."""
    return [_event(row) for row in _rows().filter(seq__gt=after).order_by("seq")]


def deliver(handlers: Handlers, events: Iterable[Event], *, copies: int = 1) -> None:
    """Call the handlers with these events, each ``copies`` times, as a relay would.

    It calls them in the thread of the test, so that they see what a TestCase has not committed. An error of a handler
    passes, and a type that has none is skipped.
    """
    for event in events:
        for _ in range(copies):
            handler = handlers.handler_of(event)
            while handler is not None:
                if handler.is_async:
                    async_to_sync(partial(_awaited, handler.call))(event)
                else:
                    handler.call(event)
                handler = handler.then


def relay_events() -> None:
    """Run the relay of the setting PILLARBOX until no event is ready.

    For TransactionTestCase: it has connections of its own, and sees what is committed.
    """
    from pillarbox.cli.relay import configured
    from pillarbox.cli.settings import Settings

    relay = configured(Settings({}, {}, None, configuration().document()))

    async def drain() -> None:
        async with relay:
            await relay.drain()

    asyncio.run(drain())


def clear_outbox() -> None:
    """Delete all events, dead letters, and rows of inboxes and idempotency keys. For ``setUp`` of a
    TransactionTestCase, which leaves tables alone whose models are not managed.
    """
    parts, connection = configuration().names.parts, connections[_rows().db]
    known = set(connection.introspection.table_names())
    with connection.cursor() as cursor:
        for name in TABLES:
            if name not in _KEPT and parts[name].rpartition(".")[2] in known:
                cursor.execute(f"DELETE FROM {parts[name]}")


async def _awaited(call: Any, event: Event) -> None:
    returned = call(event)
    if inspect.isawaitable(returned):
        await returned


def _rows() -> Any:
    """The rows of events, in the database that has the outbox."""
    return apps.get_model("pillarbox", "Event")._default_manager.using(configuration().alias)


def _last_seq() -> int:
    last = _rows().order_by("-seq").values_list("seq", flat=True).first()
    return 0 if last is None else int(last)


def _event(row: Any) -> Event:
    created = _utc(row.created_at)
    return Event(
        id=row.id,
        seq=row.seq,
        tenant=row.tenant,
        topic=row.topic,
        type=row.type,
        aggregate_type=row.aggregate_type,
        aggregate_id=row.aggregate_id,
        aggregate_version=row.aggregate_version,
        key=row.key,
        routing_key=row.routing_key,
        payload=bytes(row.payload),
        content_type=row.content_type,
        schema_id=row.schema_id,
        schema_version=row.schema_version,
        created_at=created,
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        occurred_at=_utc(row.occurred_at) if row.occurred_at else created,
        headers=json.loads(row.headers) if row.headers else NO_HEADERS,
        stream=row.stream,
        status=Status(row.status),
        available_at=_utc(row.available_at) if row.available_at else None,
    )


def _utc(instant: datetime) -> datetime:
    # Without USE_TZ Django drops the zone of the database's instants, which are in UTC.
    return instant.astimezone(UTC) if instant.tzinfo else instant.replace(tzinfo=UTC)
