from pathlib import Path

import pytest

from pillarbox.conformance import Connect
from pillarbox.stores.sqlite import SqliteStore
from tests.conformance.sql_store import SqlStoreContract


class TestSqlite(SqlStoreContract):
    concurrent_writers = False

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Connect:
        return lambda *, shards=4: SqliteStore(str(tmp_path / "outbox.db"), shards=shards)
