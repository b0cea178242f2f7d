"""What applications test with: captures, deliveries, `assert_applied_once`, `relay.test`, and pytest's fixtures."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy.orm

from pillarbox import Event, Handlers, Inbox, Outbox, Relay, Stream
from pillarbox.errors import ConfigError
from pillarbox.sources.memory import MemorySource
from pillarbox.stores.memory import MemoryStore
from pillarbox.testing import assert_applied_once, capture, deliver

Connect = Callable[[], sqlite3.Connection]


@pytest.fixture
def connect(outbox_url: str) -> Connect:
    """The plugin's fixture, as a user's test asks for it."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(outbox_url.removeprefix("sqlite:///"), timeout=10)

    with connect() as connection:
        connection.execute("CREATE TABLE mail (about text)")
    connection.close()
    return connect


def mails(connect: Connect) -> list[Any]:
    connection = connect()
    rows = connection.execute("SELECT about FROM mail").fetchall()
    connection.close()
    return rows


def test_only_committed_events_are_kept(connect: Connect) -> None:
    outbox = Outbox()
    with outbox.capture(committed=connect) as events:
        for name in ("kept", "lost"):
            connection = connect()
            outbox.add(connection, name, {})
            (connection.commit if name == "kept" else connection.rollback)()
            connection.close()
    assert [event.type for event in events] == ["kept"]
    with pytest.raises(ConfigError, match=r"does not say whom to ask; .* capture\(committed=engine\)"):
        outbox.capture(committed=True)
    with pytest.raises(ConfigError, match="leave out write or committed"):
        outbox.capture(write=False, committed=connect)


@pytest.mark.asyncio
async def test_only_committed_events_are_kept_by_an_awaited_driver(outbox_url: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    outbox, engine = Outbox(), create_async_engine(outbox_url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with outbox.capture(committed=engine) as events:
        async with outbox.transaction(engine) as tx:
            tx.add("kept", {})
        with suppress(ZeroDivisionError):
            async with outbox.transaction(engine) as tx:
                tx.add("lost", {})
                raise ZeroDivisionError
    assert [event.type for event in events] == ["kept"]
    with pytest.raises(ConfigError, match="write `async with"), outbox.capture(committed=engine):
        ...
    with pytest.raises(ConfigError, match="write `async with"), outbox.transaction(engine):
        ...
    await engine.dispose()


def test_a_sessionmaker_has_a_block_of_its_own(outbox_url: str) -> None:
    engine = sqlalchemy.create_engine(outbox_url)
    with (
        pytest.raises(ConfigError, match=r"not a sessionmaker; .* outbox.add\(session"),
        Outbox().transaction(sqlalchemy.orm.sessionmaker(engine)),
    ):
        ...
    engine.dispose()


def test_a_capture_sees_every_outbox() -> None:
    with capture(write=False) as events:
        Outbox().add(None, "a", {})
        Outbox(prefix="other").add(None, "b", {})
    assert [event.type for event in events] == ["a", "b"]


@pytest.mark.asyncio
async def test_handlers_get_copies() -> None:
    handlers, calls = Handlers(), []

    @handlers.on("a")
    def plain(event: Event) -> None:
        calls.append(event.type)

    @handlers.on("b")
    async def awaited(given: dict[str, Any]) -> None:
        calls.append(given["name"])

    a, b = Outbox().event("a", {}), Outbox().event("b", {"name": "b"})
    await deliver(handlers, [a, b], copies=2)
    await deliver(plain, a)
    assert calls == ["a", "b", "a", "b", "a"]
    with pytest.raises(ConfigError, match="no handler is registered for event type 'c'"):
        await deliver(handlers, Outbox().event("c", {}))
    with pytest.raises(ConfigError, match="copies=0"):
        await deliver(handlers, a, copies=0)


@pytest.mark.asyncio
async def test_a_handler_applies_an_event_once(connect: Connect) -> None:
    def plan_mail(event: Event, tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO mail VALUES (?)", [event.type])

    once = Inbox("mailer").once(connect)
    event = Outbox().event("a", {})
    await assert_applied_once(once(plan_mail), event, effects=lambda: mails(connect))
    assert mails(connect) == [("a",)]
    with pytest.raises(AssertionError, match=r"was not called: its inbox has event .* already"):
        await assert_applied_once(once(plan_mail), event)
    with pytest.raises(ConfigError, match=r"without @inbox.once\(...\)"):
        await assert_applied_once(print, event)


@pytest.mark.asyncio
async def test_effects_outside_of_the_transaction_are_found(connect: Connect) -> None:
    sent: list[Event] = []

    @Inbox("mailer").once(connect)
    def send(event: Event, tx: sqlite3.Connection) -> None:
        sent.append(event)

    with pytest.raises(AssertionError, match="send has effects outside of its transaction"):
        await assert_applied_once(send, Outbox().event("a", {}), effects=lambda: list(sent))
    with pytest.raises(AssertionError, match=r"send has no effect that effects\(\) shows"):
        await assert_applied_once(send, Outbox().event("a", {}), effects=lambda: 0)


@pytest.mark.asyncio
async def test_a_relay_publishes_into_a_list(outbox_url: str) -> None:
    handlers, outbox = Handlers(), Outbox()

    @handlers.on("mail.planned")
    def fail(event: Event) -> None:
        raise RuntimeError("no")

    streams = [Stream("default", to="kafka://nobody:1?topic=orders"), Stream("mail", to=handlers)]
    relay = Relay(outbox_url, streams)
    async with relay.test() as sent:
        with outbox.transaction(lambda: sqlite3.connect(outbox_url.removeprefix("sqlite:///"))) as tx:
            tx.add("order.created", {"id": 1}, key=7)
            tx.add("order.paid", {"id": 1}, key=7)
            tx.add("mail.planned", {}, stream="mail")
        with pytest.raises(ConfigError, match="runs already"):
            async with relay.test():
                ...
    assert [event.type for event in sent] == ["order.created", "order.paid"]
    assert [(failed.event.type, failed.error) for failed in sent.failed] == [("mail.planned", "RuntimeError: no")]
    async with Relay(outbox_url, Stream("default", to="stdout:")) as other:
        await other.ready()
        with pytest.raises(ConfigError, match=r"another relay serves .* an outbox of its own"):
            async with relay.test():
                ...


@pytest.mark.asyncio
async def test_a_relay_in_memory_needs_no_tables() -> None:
    store = MemoryStore()
    async with Relay(store, Stream("default", to="kafka://nobody:1?topic=orders")).test() as sent:
        await store.add([Outbox().event("a", {})])
    assert [event.type for event in sent] == ["a"]


def test_the_plugin_gives_fixtures(
    outbox_events: list[Event], outbox_store: MemoryStore, outbox_source: MemorySource, connect: Connect
) -> None:
    outbox = Outbox()
    connection = connect()
    outbox.add(connection, "a", {})
    connection.rollback()
    connection.close()
    assert [event.type for event in outbox_events] == ["a"]
    assert outbox_store.description == "sqlite :memory:"
    assert outbox_source.topic.send(outbox.event("a", {})) == "memory/0/0"


def test_the_plugin_imports_nothing_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text(
        "import sys\n\ndef test_none(request):\n"
        "    assert request.config.pluginmanager.hasplugin('pillarbox')\n"
        "    assert 'pillarbox' not in sys.modules and 'sqlite3' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "-p", "no:cov", "test_none.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
