"""PostgreSQL, by psycopg."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg_pool import ConnectionPool

from proof.content import QUEUE
from proof.databases.sql import WAITING, SqlProof
from proof.databases.triggers import log

_ANY = "INSERT OR UPDATE OR DELETE"
_ROW = {"stream": "row.stream", "shard": "row.shard", "k": "row.key"}
_EVENT = {**_ROW, "event_id": "row.id::text", "attempts": "row.attempts", "old": "before", "new": "after"}
_LEASE = {"owner": "NEW.owner", "token": "NEW.token", "until": "NEW.lease_until"}
_AUDIT = {"event_id": "NEW.event_id::text", "new": "NEW.action", "owner": "NEW.operator"}


def _triggers() -> Iterator[str]:
    """A function and a trigger for each table; ``row`` is the new row, or the deleted one."""
    for table, when, body in (
        (
            "event",
            _ANY,
            f"""IF TG_OP = 'UPDATE' AND (OLD.status, OLD.attempts) = (NEW.status, NEW.attempts) THEN
                    RETURN NULL;
                END IF;
                IF TG_OP <> 'DELETE' THEN after := NEW.status; END IF;
                IF TG_OP <> 'INSERT' THEN before := OLD.status; END IF;
                IF row.stream = '{QUEUE}' THEN held := row.lease_token;
                ELSE SELECT token INTO held FROM outbox_lease WHERE stream = row.stream AND shard = row.shard;
                END IF;
                {log("event", **_EVENT, token="held")};""",
        ),
        ("lease", "INSERT OR UPDATE", f"{log('lease', stream='NEW.stream', shard='NEW.shard', **_LEASE)};"),
        (
            "held_key",
            _ANY,
            f"""IF TG_OP <> 'DELETE' THEN after := NEW.mode; END IF;
                IF TG_OP <> 'INSERT' THEN before := OLD.mode; END IF;
                {log("held_key", **_ROW, old="before", new="after")};""",
        ),
        (
            "dead_letter",
            "INSERT OR DELETE",
            f"""IF TG_OP = 'DELETE' THEN before := 'dead'; ELSE after := 'dead'; END IF;
                {log("dead", **_EVENT)};""",
        ),
        ("audit", "INSERT", f"{log('audit', stream='NEW.stream', **_AUDIT)};"),
    ):
        yield f"""CREATE FUNCTION proof_{table}() RETURNS trigger LANGUAGE plpgsql AS $x$
            DECLARE row record; before text; after text; held bigint;
            BEGIN
                IF TG_OP = 'DELETE' THEN row := OLD; ELSE row := NEW; END IF;
                {body}
                RETURN NULL;
            END $x$"""
        yield f"""CREATE TRIGGER proof_{table} AFTER {when} ON outbox_{table}
            FOR EACH ROW EXECUTE FUNCTION proof_{table}()"""


class PostgresProof(SqlProof):
    """By psycopg."""

    name = "postgres"
    business = (
        "CREATE TABLE proof_key (k text PRIMARY KEY, n bigint NOT NULL)",
        "CREATE TABLE proof_witness (event_id text PRIMARY KEY, k text, n bigint, sha256 text, fate text)",
        "CREATE TABLE proof_effect (event_id text)",
        "CREATE TABLE proof_request (k text, body text, answer text)",
        """CREATE TABLE proof_change (seq bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp(),
            kind text, stream text, shard int, event_id text, k text, old text, new text, attempts int, owner text,
            token bigint, until timestamptz)""",
    )
    lock = ("SET lock_timeout = '1s'", "LOCK TABLE outbox_event IN ACCESS EXCLUSIVE MODE")
    Error = psycopg.Error
    triggers = tuple(_triggers())

    def __init__(self, folder: Path, url: str | None = None) -> None:
        super().__init__(folder, url)
        if url is None:
            from servers import Postgres

            self._server = Postgres(settings={"max_connections": "200"}).start()

    def connect(self) -> Any:
        return psycopg.connect(self.url, connect_timeout=5, prepare_threshold=None)

    def sessions(self) -> Any:
        # A server process for each event would be most of the work.
        return ConnectionPool(
            self.url,
            min_size=1,
            max_size=8,
            open=True,
            timeout=5,
            kwargs={"connect_timeout": 5, "prepare_threshold": None},
        )

    def cut_sessions(self) -> None:
        self.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def sample(self) -> tuple[int, float, int]:
        waiting = f"""SELECT count(*), COALESCE(extract(epoch FROM now() - min(GREATEST(created_at, last_error_at))), 0)
            FROM outbox_event WHERE {WAITING.format(key="key")}"""
        ((count, oldest),) = self.query(waiting)
        ((connections,),) = self.query("SELECT count(*) FROM pg_stat_activity")
        return int(count), float(oldest), int(connections)

    def epoch(self, column: str) -> str:
        return f"extract(epoch FROM {column})::float8"

    def version(self) -> str:
        return f"PostgreSQL {self.query('SHOW server_version')[0][0]}"
