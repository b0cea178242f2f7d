"""The columns of an INSERT, and the row that fills them."""

from datetime import UTC, datetime
from uuid import UUID

from pillarbox import Outbox, Status
from pillarbox.event import key_hash
from pillarbox.sql.columns import COLUMNS, CONVERTED, POSTGRES_TYPES, event_row

AT = datetime(2026, 1, 2, tzinfo=UTC)


def test_a_row_has_the_columns_in_their_order() -> None:
    assert tuple(event_row(Outbox().event("t", {}))) == COLUMNS
    assert {*CONVERTED, *POSTGRES_TYPES} <= set(COLUMNS)


def test_each_column_is_the_field_of_its_name() -> None:
    event = Outbox().event(
        "order.paid",
        b"x",
        key="k",
        topic="orders",
        stream="mail",
        tenant="acme",
        id=UUID(int=7),
        aggregate_type="order",
        aggregate_id="7",
        aggregate_version=3,
        routing_key="eu",
        content_type="text/plain",
        schema_id="s",
        schema_version="1",
        occurred_at=AT,
        available_at=AT,
        max_attempts=4,
        headers={"a": "ü"},
    )
    row = event_row(event)
    made = {"key_hash": key_hash(event.id, "k"), "headers": '{"a": "ü"}', "next_attempt_at": AT}
    assert row == {name: made[name] if name in made else getattr(event, name) for name in COLUMNS}
    assert row["status"] is Status.SCHEDULED


def test_the_database_sets_the_instant_of_writing() -> None:
    event = Outbox().event("t", {})
    assert event_row(event)["occurred_at"] is None
