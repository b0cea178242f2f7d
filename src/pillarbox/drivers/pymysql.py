"""A PyMySQL connection or cursor."""

from typing import Any

from pymysql.cursors import Cursor

from pillarbox.drivers._mysql import MysqlDriver
from pillarbox.drivers.contract import Answer, Driver, Statement


class PyMysql(MysqlDriver):
    def ask(self, statement: Statement) -> Answer:
        # A plain cursor, even if the connection's default is another kind.
        with self.connection.cursor(Cursor) as cursor:
            cursor.execute(statement.text, statement.values)
            return Answer(cursor.fetchall() if statement.has_rows else (), cursor.rowcount)

    def is_closed(self) -> bool:
        return not self.connection.open


def driver(handle: Any) -> Driver:
    return PyMysql(handle.connection if isinstance(handle, Cursor) else handle)
