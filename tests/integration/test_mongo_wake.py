"""A change stream wakes a sleeping relay. When it fails it is opened again, and no event is lost."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.stores.mongo import MongoStore, wake
from servers import Mongo, MongoStandalone
from tests.integration.mongos import Recorder, failing
from tests.integration.relays import STREAM, MongoOutbox, mongo_outbox, numbered, relay, stream, until

# When a server closes a connection, the driver leaves the socket to the garbage collector.
pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

SOON = 5.0  # far below the ten seconds after which a sleeping relay looks by itself


@pytest.fixture(scope="module")
def faulty(mongo: Mongo) -> Iterator[Mongo]:
    """A server whose commands can be made to fail. ``mongo`` skips the test where MongoDB is missing."""
    assert mongo.running
    with Mongo(settings={"enableTestCommands": "1"}) as server:
        yield server


@pytest.fixture
def mg(faulty: Mongo) -> MongoOutbox:
    return mongo_outbox(faulty.url)


class Sleepers:
    """The workers that sleep on a store."""

    def __init__(self, store: MongoStore, patch: pytest.MonkeyPatch) -> None:
        self._asleep: set[str] = set()
        real = store.doze

        async def doze(stream: str, worker: str, asleep: bool) -> None:
            await real(stream, worker, asleep)
            (self._asleep.add if asleep else self._asleep.discard)(worker)

        patch.setattr(store, "doze", doze)

    async def wait(self) -> None:
        await until(lambda: self._asleep)
        # Opening the change stream asked for one more poll: it is over by then.
        await asyncio.sleep(0.3)


async def test_an_event_wakes_a_relay_after_each_failure_of_its_change_stream(
    faulty: Mongo, mg: MongoOutbox, store: MongoStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wake, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(wake, "_AWAIT_SECONDS", 0.5)
    caplog.set_level(logging.INFO, logger="pillarbox.stores.mongo")
    to, own = MemoryPublisher(), mg()
    sleepers = Sleepers(own, monkeypatch)
    async with relay(own, stream(to, poll_limit=10)):
        await sleepers.wait()
        await store.add(numbered("k", 1))
        await to.wait_for(1, timeout=SOON)
        troubles: tuple[dict[str, Any], ...] = ({"closeConnection": True}, {"errorCode": 286}, {"errorCode": 43})
        for count, trouble in enumerate(troubles, start=2):
            await sleepers.wait()
            with failing(faulty, "getMore", **trouble) as failed:
                # The getMore that waits now ends soon. The next one fails.
                await failed()
            await store.add(numbered("k", 1, first=count))
            await to.wait_for(count, timeout=SOON)
    assert [record for record in caplog.records if getattr(record, "action", None) == "watch_again"], "history was lost"


async def test_a_standalone_server_is_polled_and_the_log_says_so_once(
    mongo_standalone: MongoStandalone, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = mongo_outbox(mongo_standalone.url)
    store = outbox()
    await store.migrate()
    await store.open()
    await store.close()
    assert not store.features.wake_up
    to = MemoryPublisher()
    async with relay(store, stream(to)) as running:
        await running.ready()
        await store.add(numbered("k", 3))
        await to.wait_for(3)
    told = [record for record in caplog.records if getattr(record, "action", None) == "standalone"]
    assert len(told) == 1


async def test_a_change_stream_asks_rarely_and_does_not_keep_a_store_from_closing(
    mg: MongoOutbox, store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(wake, "_AWAIT_SECONDS", 2 * SOON)
    own = mg()
    await own.open(on_wake=lambda _: None)
    await own.doze(STREAM, "ann", True)
    await until(lambda: any("getMore" in command for command in recorder.sent))
    (asked,) = recorder.take("getMore")
    assert asked["maxTimeMS"] == 1000 * 2 * SOON
    async with asyncio.timeout(SOON):
        await own.close()


@pytest.mark.parametrize(
    ("options", "milliseconds"), [("", 5000), ("?socketTimeoutMS=3000", 1500), ("?timeoutMS=2000", 1000)]
)
async def test_a_change_stream_waits_for_less_than_a_client_of_the_application(options: str, milliseconds: int) -> None:
    async with AsyncMongoClient[Any](f"mongodb://localhost/{options}", connect=False) as client:
        assert wake._await_ms(client) == milliseconds


async def test_a_close_ends_a_doze_that_waits_for_its_stream(mg: MongoOutbox, store: MongoStore) -> None:
    own = mg()
    await own.open(on_wake=lambda _: None)
    dozing = asyncio.create_task(own.doze(STREAM, "ann", True))
    await asyncio.sleep(0)
    await own.close()
    async with asyncio.timeout(SOON):
        await dozing
