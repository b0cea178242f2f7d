import itertools
import os

import pytest

from pillarbox.conformance import Connect
from pillarbox.stores.mysql import MysqlStore
from servers import MySQL
from tests.conformance.sql_store import SqlStoreContract

_numbers = itertools.count(1)


class TestMysql(SqlStoreContract):
    @pytest.fixture
    def connect(self, mysql: MySQL) -> Connect:
        prefix = f"contract_{os.getpid()}_{next(_numbers)}"
        return lambda *, shards=4: MysqlStore(mysql.url, prefix=prefix, shards=shards)
