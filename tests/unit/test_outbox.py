"""Making events: defaults, routes, and what is refused in the writer's transaction."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import pytest_asyncio
from bson import ObjectId

from pillarbox import InvalidEvent, Outbox, Status
from pillarbox.errors import ConfigError, DuplicateEvent, NotInTransaction, SchemaError
from pillarbox.ids import uuid7
from pillarbox.stores.sqlite import SqliteStore

outbox = Outbox()


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Far(tzinfo):
    def utcoffset(self, instant: datetime | None) -> timedelta:
        return timedelta(hours=30)

    dst = utcoffset

    def tzname(self, instant: datetime | None) -> str:
        return "far"


class Colour(Enum):
    RED = 1


def test_defaults() -> None:
    event = outbox.event("order.created", {"id": 7}, aggregate_id=7)
    assert (event.key, event.aggregate_id, event.stream, event.tenant, event.topic) == (
        "7",
        "7",
        "default",
        "default",
        "",
    )
    assert (event.status, event.content_type, event.payload) == (Status.PENDING, "application/json", b'{"id":7}')
    assert event.id.version == 7


def test_key_goes_before_the_aggregate() -> None:
    assert outbox.event("t", {}, key=1, aggregate_id=2).key == "1"


def test_instants_are_utc() -> None:
    at = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    event = outbox.event("t", {}, occurred_at=at, available_at=at)
    assert event.occurred_at == event.available_at == datetime(2026, 1, 1, 10, tzinfo=UTC)
    assert event.status is Status.SCHEDULED


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"type": ""}, "type is empty"),
        ({"type": "x" * 256}, "type has 256 characters, the limit is 255"),
        ({"topic": "x" * 250}, "topic has 250 characters, the limit is 249"),
        ({"key": "x" * 256}, "key has 256"),
        ({"stream": ""}, "stream is empty"),
        ({"type": "a\0b"}, "type contains a NUL"),
        ({"key": "ä\0"}, "key contains a NUL"),
        ({"key": "\ud800"}, "key contains a lone surrogate"),
        ({"tenant": 7}, "tenant is of type int"),
        ({"headers": {"a": 1}}, "not text"),
        ({"headers": {"a": "x\0"}}, "NUL"),
        ({"headers": {"a": "x" * 40_000}}, "limit is 32,768"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"max_attempts": True}, "max_attempts is True"),
        ({"aggregate_version": 2**63}, "aggregate_version"),
        ({"occurred_at": datetime(2026, 1, 1)}, "occurred_at has no time zone"),
        ({"occurred_at": "2026-01-01"}, "occurred_at is of type str"),
        ({"available_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=2)))}, "before year 1"),
        ({"available_at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=2)))}, "after year 9999"),
        ({"headers": "a=b"}, "headers are of type str"),
        ({"headers": [("a", "b")]}, "headers are of type list"),
        ({"type": None}, "type is of type NoneType"),
        ({"topic": None}, "topic is of type NoneType"),
        ({"tenant": None}, "tenant is of type NoneType"),
        ({"id": "x"}, "id is of type str"),
        ({"id": ""}, "id is of type str"),
        ({"key": object()}, "key is of type object; pass text, a whole number or a UUID"),
        ({"key": Hostile()}, "key is of type Hostile"),
        ({"key": b"x"}, "key is of type bytes"),
        ({"key": True}, "key is of type bool"),
        ({"key": 1.5}, "key is of type float"),
        ({"key": 10**5000}, "key is of type int"),
        ({"aggregate_id": Hostile()}, "aggregate_id is of type Hostile"),
        ({"tenant": ["acme"]}, "tenant is of type list"),
        ({"content_type": []}, "content_type is of type list"),
        ({"content_type": ""}, "content_type is empty"),
        ({"max_attempts": Hostile()}, "max_attempts is of type Hostile"),
        ({"max_attempts": 10**5000}, "max_attempts is a number of more than 30 digits"),
        ({"occurred_at": datetime(2026, 1, 1, tzinfo=Far())}, "occurred_at has a wrong time zone"),
        ({"occurred_at": datetime(999, 12, 31, tzinfo=UTC)}, "occurred_at is in the year 999; pass .* 1000 to 9998"),
        ({"occurred_at": datetime(9999, 1, 1, tzinfo=UTC)}, "occurred_at is in the year 9999"),
        ({"available_at": datetime(1970, 1, 1, tzinfo=UTC)}, "available_at is in the year 1970; pass .* 1971 to 9998"),
        ({"available_at": datetime(1960, 1, 1, tzinfo=UTC)}, "available_at is in the year 1960"),
    ],
)
def test_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidEvent, match=named):
        outbox.event(fields.pop("type", "order.created"), {}, **fields)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("a", "a"),
        (-7, "-7"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (Colour.RED, "1"),
        (ObjectId("0" * 24), "0" * 24),
        (None, None),
    ],
)
def test_a_key_is_of_a_type_with_one_text_for_each_value(key: object, text: str | None) -> None:
    assert outbox.event("t", {}, key=key).key == text


@pytest.mark.parametrize("text", ["NaN", "-sNaN", "Infinity", "-Infinity"])
def test_a_decimal_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidEvent, match="contains NaN or infinity"):
        outbox.event("t", {"price": Decimal(text)})
    assert outbox.event("t", {"price": Decimal("1.10")}).payload == b'{"price":"1.10"}'


@pytest.mark.parametrize("id", [{"$ne": None}, None, 7, "", "x", b"x" * 16, ["a"], Hostile()])
def test_only_an_id_can_exist(connection: sqlite3.Connection, id: Any) -> None:
    with pytest.raises(InvalidEvent, match="this is not an event's id"):
        outbox.exists(connection, id)
    with pytest.raises(InvalidEvent, match="stream is of type dict"):
        outbox.exists(connection, uuid4(), {"$ne": None})  # type: ignore[arg-type]


def test_an_id_may_be_given_as_text(connection: sqlite3.Connection) -> None:
    event = outbox.add(connection, "t", {})
    assert outbox.exists(connection, str(event.id))
    assert not outbox.exists(connection, str(uuid4()))


def test_payload_limit_is_exact() -> None:
    small = Outbox(payload_limit=10)
    assert small.event("t", b"x" * 10).payload == b"x" * 10
    with pytest.raises(InvalidEvent, match="the payload has 11 bytes, the limit is 10"):
        small.event("t", b"x" * 11)


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="payload_limit is 0"):
        Outbox(payload_limit=0)
    with pytest.raises(ConfigError, match="prefix 'out-box'"):
        Outbox(prefix="out-box")


@pytest_asyncio.fixture
async def path(tmp_path: Path) -> AsyncIterator[str]:
    file = str(tmp_path / "shop.db")
    store = SqliteStore(file)
    await store.migrate()
    await store.close()
    yield file


@pytest.fixture
def connection(path: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        yield connection


def count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM outbox_event").fetchone()[0])


def test_commits_and_rolls_back_with_the_data(connection: sqlite3.Connection) -> None:
    outbox.add(connection, "t", {}, key=1)
    connection.rollback()
    assert count(connection) == 0
    outbox.add(connection.cursor(), "t", {}, key=1)
    connection.commit()
    assert count(connection) == 1


def test_refused_event_leaves_a_transaction_that_can_be_rolled_back(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE data (x)")
    connection.execute("INSERT INTO data VALUES (1)")
    with pytest.raises(InvalidEvent):
        outbox.add(connection, "t", {"x": float("nan")})
    connection.rollback()
    assert connection.execute("SELECT count(*) FROM data").fetchone()[0] == 0


def test_duplicate_id(connection: sqlite3.Connection) -> None:
    event_id = uuid7()
    outbox.add(connection, "t", {}, id=event_id)
    with pytest.raises(DuplicateEvent, match="in the outbox already"):
        outbox.add(connection, "t", {}, id=event_id)
    connection.commit()
    assert count(connection) == 1


def test_outside_a_transaction(path: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        with pytest.raises(NotInTransaction, match="BEGIN"):
            outbox.add(connection, "t", {})
        connection.execute("BEGIN")
        outbox.add(connection, "t", {})
        connection.execute("COMMIT")
        assert count(connection) == 1


def test_no_tables(tmp_path: Path) -> None:
    empty = closing(sqlite3.connect(tmp_path / "empty.db"))
    with empty as connection, pytest.raises(SchemaError, match="no outbox 'outbox' yet"):
        outbox.add(connection, "t", {})


def test_unknown_handle() -> None:
    with pytest.raises(ConfigError, match=r"cannot write with a builtins\.dict"):
        outbox.add({}, "t", {})


def test_events_that_were_not_made_by_the_outbox(connection: sqlite3.Connection) -> None:
    made: Any = outbox.event("t", {})
    wrongs: list[Any] = [made, ["t"], [made._replace(type="x" * 256)]]
    for wrong in wrongs:
        with pytest.raises(InvalidEvent):
            outbox.add_all(connection, wrong)
    assert not connection.in_transaction


def test_events_from_a_generator(connection: sqlite3.Connection) -> None:
    made: Any = (outbox.event("t", {}) for _ in range(2))
    with outbox.capture() as events:
        outbox.add_all(connection, made)
    assert len(events) == count(connection) == 2


def test_an_early_instant_is_text_that_can_be_read(connection: sqlite3.Connection) -> None:
    early = datetime(1000, 2, 3, tzinfo=UTC)
    outbox.add(connection, "t", {}, occurred_at=early)
    (text,) = connection.execute("SELECT occurred_at FROM outbox_event").fetchone()
    assert datetime.fromisoformat(f"{text}+00:00") == early


class Region(Enum):
    EU = "eu"


def test_a_key_is_the_text_that_a_consumer_would_expect() -> None:
    assert Outbox().event("x", {}, key=Region.EU).key == "eu"
    assert Outbox().event("x", {}, key=7, aggregate_id=Region.EU).aggregate_id == "eu"
    for fields in ({"key": b"k"}, {"aggregate_id": bytearray(b"k")}):
        with pytest.raises(InvalidEvent, match="decode it"):
            Outbox().event("x", {}, **fields)
