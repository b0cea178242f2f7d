"""A network that swallows everything: a call of the store ends, and works again once the network is mended."""

import asyncio
import logging
import os

import pytest

from pillarbox.conformance.probes import probe_of
from pillarbox.errors import StoreDown
from pillarbox.stores.postgres import PostgresStore, connections, database, listener
from proof.proxy import Proxy
from servers import Postgres
from tests.integration.relays import until

SOON = 0.5


@pytest.mark.asyncio
@pytest.mark.timeout(60)  # the driver itself would wait for minutes
async def test_postgres(postgres: Postgres) -> None:
    async with Proxy("127.0.0.1", postgres.port) as proxy:
        url = postgres.url.replace(f":{postgres.port}/", f":{proxy.port}/")
        store = PostgresStore(url, prefix=f"half_open_{os.getpid()}", wake_up=False)
        await store.migrate()
        await store.open()
        await proxy.drop("both")
        # Only here: with a network that works, a slow machine may need more.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(database, "COMMAND_SECONDS", SOON)
            patch.setattr(connections, "CONNECT_SECONDS", SOON)
            with pytest.raises(StoreDown):
                await store.poll("orders", "ann", None)
        await proxy.heal()
        work = await store.poll("orders", "ann", None)
        assert not work.ready
        await store.close()


@pytest.mark.asyncio
@pytest.mark.timeout(60)
async def test_a_listening_connection_that_is_cut_without_a_word_is_replaced(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_ASK_SECONDS", "_RETRY_SECONDS"):
        monkeypatch.setattr(listener, name, 0.05)
    monkeypatch.setattr(listener, "_ANSWER_SECONDS", SOON)
    woken = asyncio.Event()
    async with Proxy("127.0.0.1", postgres.port) as proxy:
        url = postgres.url.replace(f":{postgres.port}/", f":{proxy.port}/")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "CONNECT_SECONDS", SOON)  # of the listening connection
            store = PostgresStore(postgres.url, prefix=f"half_open_{os.getpid()}", listen_url=url)
        await store.migrate()
        await store.open(lambda _: woken.set())
        probe = probe_of(store)

        async def is_woken() -> None:
            woken.clear()
            while not woken.is_set():
                await probe.query(f"SELECT pg_notify('{probe.tables['channel']}', 'orders')")
                await asyncio.sleep(0.01)

        await is_woken()
        with caplog.at_level(logging.WARNING):
            await proxy.drop("both")
            await until(lambda: "cannot listen for wake-ups" in caplog.text)
        await proxy.heal()
        await is_woken()
        assert await store.remove()
        await store.close()
