import itertools
import os

import pytest

from pillarbox.conformance import Connect
from pillarbox.store import Features
from pillarbox.stores.postgres import PostgresStore
from servers import Postgres, Postgres15
from tests.conformance.sql_store import SqlStoreContract

_numbers = itertools.count(1)


class TestPostgres(SqlStoreContract):
    features = Features(wake_up=True)

    @pytest.fixture
    def connect(self, postgres: Postgres) -> Connect:
        prefix = f"contract_{os.getpid()}_{next(_numbers)}"
        return lambda *, shards=4: PostgresStore(postgres.url, prefix=prefix, shards=shards)


class TestPostgres15(TestPostgres):
    """The same on the oldest version that is promised."""

    @pytest.fixture
    def connect(self, postgres15: Postgres15) -> Connect:
        prefix = f"contract_{os.getpid()}_{next(_numbers)}"
        return lambda *, shards=4: PostgresStore(postgres15.url, prefix=prefix, shards=shards)
