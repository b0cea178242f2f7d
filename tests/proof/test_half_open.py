"""A network that swallows everything: a call of the store ends, and works again once the network is mended."""

import os

import pytest

from pillarbox.errors import StoreDown
from pillarbox.stores.postgres import PostgresStore, connections, database
from proof.proxy import Proxy
from servers import Postgres

SOON = 0.5


@pytest.mark.asyncio
@pytest.mark.timeout(60)  # the driver itself would wait for minutes
async def test_postgres(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connections, database):
        monkeypatch.setattr(module, "COMMAND_SECONDS", SOON)
    monkeypatch.setattr(connections, "CONNECT_SECONDS", SOON)
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
