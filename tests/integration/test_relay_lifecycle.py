"""Starting and stopping a relay: inside an application, in more than one event loop, and within its grace."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pillarbox import Handlers
from pillarbox.conformance.probes import probe_of
from pillarbox.errors import ConfigError, PillarboxError, SchemaError
from pillarbox.event import Status
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import supervisor
from pillarbox.stores.postgres import PostgresStore
from tests.integration.commands import Command
from tests.integration.relays import (
    LEASE,
    WAIT,
    Outbox,
    SqlOutbox,
    by_key,
    counts,
    in_order,
    numbered,
    relay,
    settled,
    stream,
    until,
)

APPLICATION = """
import asyncio, signal, sys
from fastapi import FastAPI
from pillarbox import Relay, Stream

relay = Relay(sys.argv[1], [Stream("default", to="stdout:")])
app = FastAPI(lifespan=relay.lifespan)

async def serve():
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    async with app.router.lifespan_context(app):
        print("serving", flush=True)
        await asked.wait()
    print("stopped", flush=True)

asyncio.run(serve())
"""


@pytest.fixture
def silent_server() -> Iterator[int]:
    """The port of a server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def actions(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [getattr(record, "action", "") for record in caplog.records if record.levelname == level]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("scheme", "number"),
    [
        ("postgresql", signal.SIGTERM),
        ("postgresql", signal.SIGINT),
        ("mysql", signal.SIGTERM),
        ("mongodb", signal.SIGTERM),
    ],
)
async def test_an_application_starts_and_stops_without_its_database(
    silent_server: int, scheme: str, number: signal.Signals
) -> None:
    url = f"{scheme}://nobody@127.0.0.1:{silent_server}/shop"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", APPLICATION, url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), WAIT) == b"serving\n"
        process.send_signal(number)
        out, err = await asyncio.wait_for(process.communicate(), WAIT)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, out, b"Traceback" in err) == (0, b"stopped\n", False), err


@pytest.mark.asyncio
async def test_ready_waits_for_the_database(
    sqlite: SqlOutbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It raises what no waiting mends, and the relay tries on until somebody has mended it."""
    monkeypatch.setattr(supervisor, "_CONNECT_SECONDS", 0.01)
    own, to = sqlite(), MemoryPublisher()
    async with relay(own, stream(to)) as running:
        for ask in (running.ready, running.drain):
            with pytest.raises(SchemaError, match="does not exist"):
                await ask()
        other = sqlite()
        await other.migrate()
        await other.open()
        await until(lambda: "store_up" in actions(caplog, "WARNING"))
        await running.ready()
        await other.add(numbered("k", 3))
        await running.drain()
        await other.close()
    assert by_key(to.deliveries) == in_order(["k"], 3)
    told = [record.getMessage() for record in caplog.records if getattr(record, "action", "") == "store_refused"]
    assert len(told) == len(set(told)), "each error is said once, however often it is tried"


@pytest.mark.asyncio
async def test_ready_means_that_every_stream_has_its_worker(outbox: Outbox) -> None:
    own = outbox()
    await own.migrate()
    async with relay(own, stream(MemoryPublisher()), stream(MemoryPublisher(), "jobs", mode="queue")) as running:
        await running.ready()
        assert [(stream, len(workers)) for stream, workers in sorted((await own.workers()).items())] == [
            ("jobs", 1),
            ("orders", 1),
        ]
        await running.ready()


@pytest.mark.asyncio
async def test_a_destination_that_cannot_work_is_told_once_and_raised_by_ready(
    sqlite: SqlOutbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_RESTART_SECONDS", (0.001, 0.001))
    opened = 0

    class Wrong(MemoryPublisher):
        async def open(self) -> None:
            nonlocal opened
            opened += 1
            raise ConfigError("the certificate is a folder; name a file")

    own = sqlite()
    await own.migrate()
    async with relay(own, stream(MemoryPublisher()), stream(Wrong(), "wrong")) as running:
        with pytest.raises(ConfigError, match="name a file"):
            await running.ready()
        await until(lambda: opened > 5)
    assert actions(caplog, "ERROR") == ["restarting"]


def test_the_command_exits_if_a_destination_cannot_work(on_sqlite: Command) -> None:
    (on_sqlite.folder / "shop.py").write_text("from pillarbox import Handlers\nhandlers = Handlers()\n")
    (on_sqlite.folder / "pillarbox.toml").write_text("[streams.default]\nto = 'shop:handlers'\n")
    ended = on_sqlite("relay", "--log-level", "error")
    ended.failed(2, "pillarbox: no handler is registered; import the module")


def test_a_relay_works_in_one_event_loop_after_another(outbox: Outbox) -> None:
    """As with asyncio.run in a script, and with a loop for each test."""
    to = MemoryPublisher()
    own = outbox()
    running = relay(own, stream(to), stream(to, "jobs", mode="queue"))

    async def make() -> None:
        await own.migrate()
        await own.close()

    async def once(number: int) -> None:
        async with running:
            await running.ready()
            # Several at once, so that somebody waits for each lock.
            events = [numbered(f"{number}-{n}", 5, stream=name) for n in range(9) for name in ("orders", "jobs")]
            await asyncio.gather(*(own.add(each) for each in events))
            await to.wait_for(90 * (number + 1))
            await running.drain()

    asyncio.run(make())
    for number in range(3):
        asyncio.run(once(number))
    assert len(to.deliveries) == 270


TWICE = """
import asyncio, sys
from pillarbox.conformance.events import make_event
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.relay import Relay, Stream
from pillarbox.urls import store_from_url

to = MemoryPublisher()
relay = Relay(store_from_url(sys.argv[1], prefix=sys.argv[2]), [Stream("default", to)])

async def publish():
    async with relay:
        await relay.ready()
        await relay.store.add([make_event()])
        await relay.drain()

asyncio.run(relay.store.migrate())
asyncio.run(publish())
print(len(to.deliveries))
"""


def test_a_store_that_was_left_open_in_another_event_loop_is_opened_again(outbox: Outbox) -> None:
    """Migrate and run are two calls of asyncio.run in many scripts."""
    probe = probe_of(outbox())
    command = [sys.executable, "-c", TWICE, probe.url, probe.prefix]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert ended.stdout == "1\n", ended.stderr


def test_handlers_work_in_one_event_loop_after_another(sqlite: SqlOutbox) -> None:
    handlers = Handlers(concurrency=2)
    handled: list[str | None] = []

    @handlers.on("order.created")
    async def handle(event: Any) -> None:
        await asyncio.sleep(0)
        handled.append(event.key)

    own = sqlite()
    running = relay(own, stream(handlers))

    async def once(number: int) -> None:
        async with running:
            await running.ready()
            await own.add([event for n in range(20) for event in numbered(f"{number}-{n}", 1, type="order.created")])
            await running.drain()

    async def make() -> None:
        await own.migrate()
        await own.close()

    asyncio.run(make())
    for number in range(2):
        asyncio.run(once(number))
    assert len(handled) == 40


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["drain", "ready"])
async def test_a_question_to_a_relay_that_does_not_run_is_refused(sqlite: SqlOutbox, name: str) -> None:
    waiting = relay(sqlite(), stream(MemoryPublisher()))
    with pytest.raises(ConfigError, match=rf"{name}\(\) needs a relay that runs; call it inside `async with relay:`"):
        await getattr(waiting, name)()
    await waiting.stop()


@pytest.mark.asyncio
async def test_who_waits_for_a_relay_learns_of_its_stop() -> None:
    waiting = relay(PostgresStore("postgresql://nobody@127.0.0.1:1/none"), stream(MemoryPublisher()))
    await waiting.start()
    asking = asyncio.create_task(waiting.ready())
    await asyncio.sleep(0)
    await waiting.stop()
    with pytest.raises(PillarboxError, match="was stopped before it served"):
        await asking


class Endless(MemoryPublisher):
    """Its calls and its close never end, whoever cancels them."""

    def __init__(self) -> None:
        super().__init__()
        self.called = asyncio.Event()
        self.over = asyncio.Event()

    async def _never(self) -> None:
        while not self.over.is_set():
            try:
                await self.over.wait()
            except asyncio.CancelledError:
                continue

    async def publish(self, batch: Any) -> Any:
        self.called.set()
        await self._never()
        return await super().publish(batch)

    async def close(self) -> None:
        await self._never()


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["ordered", "queue"])
async def test_a_stop_ends_in_time_whatever_hangs(sqlite: SqlOutbox, mode: str) -> None:
    own, other, to = sqlite(), sqlite(), Endless()
    await own.migrate()
    await own.add(numbered("k", 1))
    running = relay(own, stream(to, mode=mode), grace=1.0)
    await running.start()
    await to.called.wait()
    begun = time.monotonic()
    await asyncio.wait_for(running.stop(), 60)
    seconds = time.monotonic() - begun
    to.over.set()
    assert seconds < 20, "each step alone used to have a minute"
    await other.open()
    assert (await counts(other)).keys() <= {Status.PENDING, Status.PROCESSING}
    await other.close()


@pytest.mark.asyncio
async def test_a_handler_that_hangs_does_not_hold_the_stop(sqlite: SqlOutbox) -> None:
    """The handlers' own grace would come on top."""
    handlers = Handlers(timeout=None, grace=600)
    called = asyncio.Event()

    @handlers.on("order.created")
    async def hang(event: Any) -> None:
        called.set()
        await asyncio.Event().wait()

    own, other = sqlite(), sqlite()
    await own.migrate()
    await own.add(numbered("k", 1, type="order.created"))
    running = relay(own, stream(handlers, lease=LEASE * 100), grace=0.2)
    await running.start()
    await called.wait()
    await asyncio.wait_for(running.stop(), WAIT)
    # Its call has ended, so nothing is left behind: the next relay need not wait for the lease.
    to = MemoryPublisher()
    async with relay(other, stream(to)):
        await to.wait_for(1)
        await settled(other, {Status.PUBLISHED: 1})
