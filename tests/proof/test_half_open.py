"""A network that swallows everything: a store's call ends, and the store works again when the network is mended."""

import os

import pytest

from pillarbox.errors import StoreDown
from pillarbox.stores import _postgres_driver
from pillarbox.stores.postgres import PostgresStore
from proof.proxy import Proxy
from tests.servers import Postgres

SOON = 0.5


@pytest.mark.asyncio
@pytest.mark.timeout(60)  # it waited for minutes: the driver asked the server to end the statement, and no answer came
async def test_postgres(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_postgres_driver, "_COMMAND_SECONDS", SOON)
    monkeypatch.setattr(_postgres_driver, "_CONNECT_SECONDS", SOON)
    async with Proxy("127.0.0.1", postgres.port) as proxy:
        url = postgres.url.replace(f":{postgres.port}/", f":{proxy.port}/")
        store = PostgresStore(url, prefix=f"half_open_{os.getpid()}", wake_up=False)
        await store.migrate()
        await store.open()
        await proxy.drop("both")
        with pytest.raises(StoreDown):
            await store.poll("orders", "ann", None)
        await proxy.heal()
        work = await store.poll("orders", "ann", None)
        assert not work.ready
        await store.close()
