"""Checks of a server of MySQL or MariaDB."""

from collections.abc import Sequence
from typing import Final

from pillarbox.errors import NotAllowed
from pillarbox.finding import Finding, ok, warning
from pillarbox.sql.statements import Statements
from pillarbox.stores._server import connections, old_transaction, time_limit
from pillarbox.stores.mysql.database import MysqlDatabase

_LIMITS: Final = ("wait_timeout", "innodb_lock_wait_timeout")


async def examine_server(
    db: MysqlDatabase, sql: Statements, *, pool_size: int, lease_seconds: float
) -> Sequence[Finding]:
    settings = dict(await db.fetch(sql["settings"]))
    found = [time_limit(name, float(settings[name]), lease_seconds) for name in _LIMITS if name in settings]
    flushes = settings.get("innodb_flush_log_at_trx_commit", "1")
    if flushes == "1":
        found.append(ok("durability", "every commit is flushed"))
    else:
        sentence = f"innodb_flush_log_at_trx_commit is {flushes}: after a crash committed events can be gone"
        found.append(warning("durability", sentence, "set it to 1"))
    ((_, used),) = await db.fetch(sql["open_connections"])
    found.append(connections(int(settings["max_connections"]), int(used), pool_size))
    try:
        ((seconds,),) = await db.fetch(sql["oldest_transaction"])
    except NotAllowed:
        remedy = "grant PROCESS to this user if you want to know"
        found.append(warning("old_transactions", "this user may not see the transactions of others", remedy))
    else:
        found.append(old_transaction(None if seconds is None else float(seconds), "a transaction of InnoDB"))
    return found
