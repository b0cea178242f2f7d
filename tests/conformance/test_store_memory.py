import pytest

from pillarbox.conformance import Connect
from pillarbox.stores.memory import MemoryStore
from tests.conformance.sql_store import SqlStoreContract


class TestMemory(SqlStoreContract):
    concurrent_writers = False
    durable = False

    @pytest.fixture
    def connect(self) -> Connect:
        store = MemoryStore(shards=4)
        return lambda *, shards=4: store
