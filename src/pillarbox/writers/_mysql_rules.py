"""What the writers for MySQL and MariaDB share."""

from typing import Any, Final

from pillarbox.writers._statements import not_in_transaction

_DUPLICATE: Final = 1062
_NO_TABLE: Final = 1146
_IN_TRANSACTION: Final = 1  # the flag of the protocol that the server sends with every answer


def in_transaction(connection: Any) -> bool:
    return bool(connection.server_status & _IN_TRANSACTION)


def refuse_autocommit(connection: Any) -> None:
    """Unless the INSERT will be part of a transaction."""
    if connection.get_autocommit() and not in_transaction(connection):
        raise not_in_transaction("MySQL connection", "call connection.begin() first")


def judge(error: Exception) -> str:
    code = error.args[0] if error.args else None
    return "duplicate" if code == _DUPLICATE else "no table" if code == _NO_TABLE else ""
