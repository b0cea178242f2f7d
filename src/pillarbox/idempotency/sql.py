"""The statements of idempotency keys on a SQL database.

The row of a key is written before the application's work, so that the database decides which request has the key.
"""

from functools import cache
from typing import Any

from pillarbox.drivers.contract import Answer as Rows
from pillarbox.drivers.contract import Driver, Statement, Steps
from pillarbox.idempotency.work import Answer, Claim, Key, Stored
from pillarbox.outbox.work import explain
from pillarbox.sql.dialects import Dialect, ErrorKind


def claim(key: Key, driver: Driver) -> Steps[Claim | Stored]:
    """Write the row of a key, or read the one that is committed."""
    driver.check()
    dialect = driver.dialect
    try:
        if dialect.database == "mysql":
            return (yield from _claim_on_mysql(key, driver))
        return (yield from _claim_at_once(key, dialect))
    except Exception as error:
        # On SQLite any writer may be the other one, so this error says nothing of the key.
        if dialect.database != "sqlite" and driver.classify(error) is ErrorKind.CONFLICT:
            return Claim.BUSY
        explain(driver, error, key.names)
        raise


def store(answer: Answer, driver: Driver) -> Steps[bool]:
    """Write the answer into the row; false: the row is gone, because its transaction was rolled back."""
    text = _update_text(answer.key.names.parts["idempotency"], driver.dialect)
    written: Rows = yield Statement(text, [answer.status, answer.headers, answer.body, answer.key.id])
    return written.affected == 1


def _claim_on_mysql(key: Key, driver: Driver) -> Steps[Claim | Stored]:
    # An INSERT would wait for the end of the other request, so a transaction of its own looks first. It keeps no lock:
    # the gap around a key that is not there may have other keys, whose requests would end in deadlocks. If the other
    # request comes between the look and the INSERT, the INSERT waits.
    dialect = driver.dialect
    try:
        found = yield from _read(key, dialect, " FOR UPDATE NOWAIT")
    except Exception as error:
        if driver.classify(error) is not ErrorKind.CONFLICT:
            raise
        # Another replay locks the row too.
        return (yield from _read(key, dialect)) or Claim.BUSY
    if found is not None:
        return found
    if not driver.is_nested:
        yield Statement("ROLLBACK AND CHAIN")
    try:
        yield Statement(_insert_text(key.names.parts["idempotency"], dialect), [key.id, key.fingerprint])
    except Exception as error:
        if driver.classify(error) is not ErrorKind.DUPLICATE:
            raise
        return (yield from _read(key, dialect, " LOCK IN SHARE MODE")) or Claim.BUSY
    return Claim.NEW


def _claim_at_once(key: Key, dialect: Dialect) -> Steps[Claim | Stored]:
    # PostgreSQL: the INSERT alone would wait for the end of the other request, so it writes only with the key's lock,
    # which it does not wait for. A replay is found without it, so that two of them do not refuse each other. SQLite
    # waits for the other writer.
    values: list[Any] = [key.id, key.fingerprint]
    if dialect.database == "postgresql":
        values.append(key.lock)
    written: Rows = yield Statement(_claim_text(key.names.parts["idempotency"], dialect), values)
    if written.affected == 1:
        return Claim.NEW
    return (yield from _read(key, dialect)) or Claim.BUSY


def _read(key: Key, dialect: Dialect, lock: str = "") -> Steps[Stored | None]:
    text = _select_text(key.names.parts["idempotency"], dialect) + lock
    answer: Rows = yield Statement(text, [key.id], has_rows=True)
    return _stored(answer.rows[0]) if answer.rows else None


def _stored(row: Any) -> Stored:
    fingerprint, status, headers, body = row
    # psycopg2 has views of memory.
    return Stored(bytes(fingerprint), status, headers, None if body is None else bytes(body))


@cache
def _claim_text(table: str, dialect: Dialect) -> str:
    if dialect.database == "sqlite":
        return _insert_text(table, dialect) + " ON CONFLICT DO NOTHING"
    id, fingerprint, lock = dialect.marks(3)
    return (
        f"INSERT INTO {table} (id, fingerprint) SELECT {id}::bytea, {fingerprint}::bytea "
        f"WHERE pg_try_advisory_xact_lock({lock}::bigint) ON CONFLICT DO NOTHING"
    )


@cache
def _insert_text(table: str, dialect: Dialect) -> str:
    return f"INSERT INTO {table} (id, fingerprint) VALUES ({', '.join(dialect.marks(2))})"


@cache
def _select_text(table: str, dialect: Dialect) -> str:
    (mark,) = dialect.marks(1)
    return f"SELECT fingerprint, status, headers, body FROM {table} WHERE id = {mark}"


@cache
def _update_text(table: str, dialect: Dialect) -> str:
    status, headers, body, id = dialect.marks(4)
    return f"UPDATE {table} SET status = {status}, headers = {headers}, body = {body} WHERE id = {id}"
