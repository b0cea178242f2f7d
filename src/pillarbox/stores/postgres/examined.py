"""Checks of a PostgreSQL server."""

from collections.abc import Sequence
from typing import Final

from pillarbox.finding import Finding, failed, ok, warning
from pillarbox.sql.statements import Statements
from pillarbox.stores._server import connections, old_transaction, time_limit
from pillarbox.stores.postgres.database import PostgresDatabase

_LIMITS: Final = (
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "transaction_timeout",
)


async def examine_server(
    db: PostgresDatabase,
    sql: Statements,
    *,
    pool_size: int,
    listens: bool,
    direct_listen: bool,
    lease_seconds: float,
) -> Sequence[Finding]:
    """listens: the relay is woken by LISTEN. direct_listen: it has a URL of its own for that."""
    settings = {name: (value, unit) for name, value, unit in await db.fetch(sql["settings"])}
    found = [time_limit(name, _seconds(*settings[name]), lease_seconds) for name in _LIMITS if name in settings]
    found.append(durability(settings["fsync"][0], settings["synchronous_commit"][0]))
    if settings["autovacuum"][0] == "on":
        found.append(ok("autovacuum", "autovacuum is on"))
    else:
        sentence = "autovacuum is off: what was deleted stays in the tables, and reads slow down"
        found.append(warning("autovacuum", sentence, "set autovacuum = on"))
    ((used,),) = await db.fetch(sql["open_connections"])
    limit = int(settings["max_connections"][0]) - int(settings["superuser_reserved_connections"][0])
    found.append(connections(limit, used, pool_size + listens))
    oldest = await db.fetch(sql["oldest_transaction"])
    seconds, what = oldest[0] if oldest else (None, "")
    found.append(old_transaction(seconds, what))
    broken = [name for (name,) in await db.fetch(sql["invalid_indexes"])]
    if broken:
        remedy = f"rebuild them with REINDEX INDEX CONCURRENTLY {broken[0]}"
        found.append(failed("indexes", f"invalid indexes: {', '.join(broken)}", remedy))
    else:
        found.append(ok("indexes", "all indexes are valid"))
    if not await db.is_pooled():
        found.append(ok("pooler", "connections lead to the server itself"))
    elif listens and not direct_listen:
        remedy = "give listen_url, a URL that leads past the pooler, or wake_up = false"
        sentence = "connections lead through a pooler, where LISTEN is lost: the relay is not woken and only polls"
        found.append(warning("pooler", sentence, remedy))
    else:
        found.append(ok("pooler", "connections lead through a pooler, and LISTEN does not need them"))
    return found


def durability(fsync: str, synchronous_commit: str) -> Finding:
    """Whether a commit is on disk when it is confirmed."""
    if fsync != "on":
        return failed("durability", "fsync is off: after a crash committed events can be gone", "set fsync = on")
    if synchronous_commit == "off":
        sentence = "synchronous_commit is off: after a crash the last committed events can be gone"
        return warning("durability", sentence, "set synchronous_commit = on, for writers too")
    return ok("durability", "fsync and synchronous_commit are on")


def _seconds(value: str, unit: str | None) -> float:
    return float(value) * {"ms": 0.001, "s": 1.0, "min": 60.0}.get(unit or "", 1.0)
