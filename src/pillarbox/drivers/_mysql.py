"""Shared by the drivers for MySQL and MariaDB."""

from typing import Any, Final

from pillarbox.drivers.contract import TextBlocks
from pillarbox.sql.dialects import MYSQL

_IN_TRANSACTION: Final = 1  # a flag of the protocol; the server sends it with every answer


class MysqlDriver(TextBlocks):
    dialect = MYSQL
    handle_name = "MySQL connection"
    remedy = "call connection.begin() first"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def in_transaction(self) -> bool:
        return bool(self.connection.server_status & _IN_TRANSACTION)

    def begins_by_itself(self) -> bool:
        return not self.connection.get_autocommit()
