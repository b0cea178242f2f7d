"""PostgreSQL, MySQL and SQLite: triggers log each change of the outbox, by the database's clock."""

import re
import sqlite3
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import UUID

import psycopg
import pymysql

from pillarbox import Outbox
from pillarbox.ids import uuid7
from proof.databases.base import Database, Writer, Written
from proof.history import Change, Final, Witness
from proof.worker import STREAM, fingerprint
from tests.servers import MySQL, Postgres, Server

_COLUMNS = "kind, stream, shard, event_id, k, old, new, attempts, owner, token, until"
_WAITING = "status IN ('pending', 'failed', 'held', 'processing')"


class SqlWriter(Writer):
    """A client whose transaction locks its keys, adds events, and writes the witness."""

    def __init__(self, database: "SqlProof") -> None:
        self._database = database
        self._connection: Any = None
        self._outbox = Outbox()

    def transact(self, wanted: Sequence[Written], *, commit: bool, hold_seconds: float) -> tuple[str, list[str]]:
        ids: list[str] = []
        try:
            connection = self._connection = self._connection or self._database.connect()
            cursor = connection.cursor()
            for each in sorted(wanted):  # in one order, so that two clients cannot wait for each other
                ids.append(self._write(connection, cursor, each))
            if hold_seconds:
                time.sleep(hold_seconds)
            if not commit:
                connection.rollback()
                return "rolled_back", ids
        except Exception:
            self.close()
            return "failed", ids
        try:
            connection.commit()
        except Exception:
            self.close()
            return "unknown", ids
        return "ok", ids

    def _write(self, connection: Any, cursor: Any, each: Written) -> str:
        execute = self._database.execute
        execute(cursor, "UPDATE proof_key SET n = n + 1 WHERE k = %s", each.key)
        execute(cursor, "SELECT n FROM proof_key WHERE k = %s", each.key)
        n = int(cursor.fetchone()[0])
        event_id, mark = uuid7(), f"{each.key}/{n}"
        payload = f'{{"n": {n}, "pad": "'.encode() + b"x" * each.size + b'"}'
        self._outbox.add(
            connection,
            "proof.event",
            payload,
            key=each.key,
            stream=STREAM,
            id=event_id,
            headers={"proof": mark, "fate": each.fate},
            content_type="application/json",
        )
        row = (str(event_id), each.key, n, fingerprint(each.key, payload, mark), each.fate)
        execute(cursor, "INSERT INTO proof_witness (event_id, k, n, sha256, fate) VALUES (%s, %s, %s, %s, %s)", *row)
        return str(event_id)

    def close(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
            self._connection = None


class SqlProof(Database):
    """What the three share."""

    business: ClassVar[Sequence[str]]
    triggers: ClassVar[Sequence[str]]
    mark: ClassVar[str] = "%s"

    _server: Server | None = None

    @property
    def server(self) -> Server | None:
        return self._server

    @property
    def url(self) -> str:
        if self._url is not None:
            return self._url
        assert self._server is not None
        return self._server.url

    def through(self, port: int) -> str:
        return re.sub(r":\d+/", f":{port}/", self.url)

    @abstractmethod
    def connect(self) -> Any: ...

    def execute(self, cursor: Any, text: str, *values: Any) -> None:
        cursor.execute(text.replace("%s", self.mark), values)

    def query(self, text: str) -> list[Any]:
        connection = self.connect()
        try:
            cursor = connection.cursor()
            cursor.execute(text)
            rows = list(cursor.fetchall())
            connection.rollback()
            return rows
        finally:
            connection.close()

    def prepare(self, keys: Sequence[str]) -> None:
        self.migrate()
        connection = self.connect()
        cursor = connection.cursor()
        for statement in (*self.business, *self.triggers):
            cursor.execute(statement)
        for key in keys:
            self.execute(cursor, "INSERT INTO proof_key (k, n) VALUES (%s, 0)", key)
        connection.commit()
        connection.close()

    def writer(self) -> Writer:
        return SqlWriter(self)

    def witness(self) -> Iterable[Witness]:
        for event_id, key, n, sha256, fate in self.query("SELECT event_id, k, n, sha256, fate FROM proof_witness"):
            yield Witness(event_id, STREAM, key, n, sha256, fate)

    def changes(self) -> Iterable[Change]:
        for row in self.query(f"SELECT seq, {self.epoch('at')}, {_COLUMNS} FROM proof_change ORDER BY seq"):
            seq, at, kind, stream, shard, event_id, key, old, new, attempts, owner, token, until = row
            yield Change(
                seq, float(at), kind, stream, shard, _id(event_id), key, old, new, attempts, owner, token, _unix(until)
            )

    def epoch(self, column: str) -> str:
        return column

    def final(self) -> Final:
        states = {_id(event_id): status for event_id, status in self.query("SELECT id, status FROM outbox_event")}
        letters = self.query("SELECT id, attempts, error FROM outbox_dead_letter")
        dead = {_id(event_id): {"attempts": attempts, "error": error} for event_id, attempts, error in letters}
        rows = self.query("SELECT operator, action, event_id FROM outbox_audit")
        audit = [{"by": by, "action": action, "event_id": _id(event_id)} for by, action, event_id in rows]
        return Final({str(key): value for key, value in states.items()}, {str(k): v for k, v in dead.items()}, audit)


def _id(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and len(value) == 36):
        return value
    if isinstance(value, UUID):
        return str(value)
    return str(UUID(bytes=value) if isinstance(value, bytes) else UUID(value))


def _unix(value: Any) -> float | None:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return float((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())


def _log(values: str) -> str:
    return f"INSERT INTO proof_change ({_COLUMNS}) VALUES ({values})"


class PostgresProof(SqlProof):
    """By psycopg."""

    name = "postgres"
    business = (
        "CREATE TABLE proof_key (k text PRIMARY KEY, n bigint NOT NULL)",
        "CREATE TABLE proof_witness (event_id text PRIMARY KEY, k text, n bigint, sha256 text, fate text)",
        """CREATE TABLE proof_change (seq bigserial PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp(),
            kind text, stream text, shard int, event_id text, k text, old text, new text, attempts int, owner text,
            token bigint, until timestamptz)""",
    )
    triggers = (
        f"""CREATE FUNCTION proof_event() RETURNS trigger LANGUAGE plpgsql AS $x$
        DECLARE row record; before text; after text; held bigint;
        BEGIN
            IF TG_OP = 'UPDATE' AND OLD.status = NEW.status AND OLD.attempts = NEW.attempts THEN RETURN NULL; END IF;
            IF TG_OP = 'DELETE' THEN row := OLD; ELSE row := NEW; after := NEW.status; END IF;
            IF TG_OP <> 'INSERT' THEN before := OLD.status; END IF;
            SELECT token INTO held FROM outbox_lease WHERE stream = row.stream AND shard = row.shard;
            {_log("'event', row.stream, row.shard, row.id::text, row.key, before, after, row.attempts, NULL, held, NULL")};
            RETURN NULL;
        END $x$""",
        f"""CREATE FUNCTION proof_lease() RETURNS trigger LANGUAGE plpgsql AS $x$
        BEGIN
            {_log("'lease', NEW.stream, NEW.shard, NULL, NULL, NULL, NULL, NULL, NEW.owner, NEW.token, NEW.lease_until")};
            RETURN NULL;
        END $x$""",
        f"""CREATE FUNCTION proof_aside() RETURNS trigger LANGUAGE plpgsql AS $x$
        DECLARE row record; before text; after text;
        BEGIN
            IF TG_OP = 'DELETE' THEN row := OLD; ELSE row := NEW; after := NEW.mode; END IF;
            IF TG_OP <> 'INSERT' THEN before := OLD.mode; END IF;
            {_log("'aside', row.stream, row.shard, NULL, row.key, before, after, NULL, NULL, NULL, NULL")};
            RETURN NULL;
        END $x$""",
        f"""CREATE FUNCTION proof_dead() RETURNS trigger LANGUAGE plpgsql AS $x$
        DECLARE row record; before text; after text;
        BEGIN
            IF TG_OP = 'DELETE' THEN row := OLD; before := 'dead'; ELSE row := NEW; after := 'dead'; END IF;
            {_log("'dead', row.stream, row.shard, row.id::text, row.key, before, after, row.attempts, NULL, NULL, NULL")};
            RETURN NULL;
        END $x$""",
        f"""CREATE FUNCTION proof_audit() RETURNS trigger LANGUAGE plpgsql AS $x$
        BEGIN
            {_log("'audit', NEW.stream, NULL, NEW.event_id::text, NULL, NULL, NEW.action, NULL, NEW.operator, NULL, NULL")};
            RETURN NULL;
        END $x$""",
        *(
            f"CREATE TRIGGER proof_{kind} AFTER {when} ON outbox_{table} FOR EACH ROW EXECUTE FUNCTION proof_{kind}()"
            for kind, table, when in (
                ("event", "event", "INSERT OR UPDATE OR DELETE"),
                ("lease", "lease", "INSERT OR UPDATE"),
                ("aside", "blocked_key", "INSERT OR UPDATE OR DELETE"),
                ("dead", "dead_letter", "INSERT OR DELETE"),
                ("audit", "audit", "INSERT"),
            )
        ),
    )

    def __init__(self, folder: Path, url: str | None = None) -> None:
        super().__init__(folder, url)
        self._server = None if url else Postgres(settings={"max_connections": "200"}).start()

    def connect(self) -> Any:
        return psycopg.connect(self.url, connect_timeout=5, prepare_threshold=None)

    def cut_sessions(self) -> None:
        self.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def sample(self) -> tuple[int, float, int]:
        waiting = f"""SELECT count(*), COALESCE(extract(epoch FROM now() - min(created_at)), 0)
            FROM outbox_event WHERE {_WAITING}"""
        ((count, oldest),) = self.query(waiting)
        ((connections,),) = self.query("SELECT count(*) FROM pg_stat_activity")
        return int(count), float(oldest), int(connections)

    def epoch(self, column: str) -> str:
        return f"extract(epoch FROM {column})::float8"

    def version(self) -> str:
        return f"PostgreSQL {self.query('SHOW server_version')[0][0]}"


def _plain_triggers(now_held: str, differ: str, body: str) -> Sequence[str]:
    """The same for databases whose triggers are for one operation each; ``body`` is the frame of one."""
    held = now_held
    wanted = [
        ("event", "INSERT", "", "'event', NEW.stream, NEW.shard, {n}, NEW.{key}, NULL, NEW.status, 0, NULL, NULL, NULL"),
        (
            "event",
            "UPDATE",
            differ,
            f"'event', NEW.stream, NEW.shard, {{n}}, NEW.{{key}}, OLD.status, NEW.status, NEW.attempts, NULL, {held}, NULL",
        ),
        ("event", "DELETE", "", "'event', OLD.stream, OLD.shard, {o}, OLD.{key}, OLD.status, NULL, 0, NULL, NULL, NULL"),
        ("lease", "UPDATE", "", "'lease', NEW.stream, NEW.shard, NULL, NULL, NULL, NULL, NULL, NEW.owner, NEW.token, {until}"),
        ("blocked_key", "INSERT", "", "'aside', NEW.stream, NEW.shard, NULL, NEW.{key}, NULL, NEW.mode, NULL, NULL, NULL, NULL"),
        ("blocked_key", "UPDATE", "", "'aside', NEW.stream, NEW.shard, NULL, NEW.{key}, OLD.mode, NEW.mode, NULL, NULL, NULL, NULL"),
        ("blocked_key", "DELETE", "", "'aside', OLD.stream, OLD.shard, NULL, OLD.{key}, OLD.mode, NULL, NULL, NULL, NULL, NULL"),
        ("dead_letter", "INSERT", "", "'dead', NEW.stream, NEW.shard, {n}, NEW.{key}, NULL, 'dead', NEW.attempts, NULL, NULL, NULL"),
        ("dead_letter", "DELETE", "", "'dead', OLD.stream, OLD.shard, {o}, OLD.{key}, 'dead', NULL, OLD.attempts, NULL, NULL, NULL"),
        ("audit", "INSERT", "", "'audit', NEW.stream, NULL, {a}, NULL, NULL, NEW.action, NULL, NEW.operator, NULL, NULL"),
    ]  # fmt: skip
    return [
        body.format(
            name=f"proof_{table}_{when.lower()}", when=when, table=table, condition=condition, insert=_log(values)
        )
        for table, when, condition, values in wanted
    ]


class MysqlProof(SqlProof):
    """By PyMySQL."""

    name = "mysql"
    business = (
        "CREATE TABLE proof_key (k varchar(255) PRIMARY KEY, n bigint NOT NULL) ENGINE=InnoDB",
        """CREATE TABLE proof_witness (event_id varchar(36) PRIMARY KEY, k varchar(255), n bigint, sha256 varchar(64),
            fate varchar(20)) ENGINE=InnoDB""",
        """CREATE TABLE proof_change (seq bigint AUTO_INCREMENT PRIMARY KEY, at double NOT NULL,
            kind varchar(20), stream varchar(100), shard int, event_id varchar(36), k varchar(255), old varchar(20),
            new varchar(20), attempts int, owner varchar(255), token bigint, until double) ENGINE=InnoDB""",
        "CREATE TRIGGER proof_clock BEFORE INSERT ON proof_change FOR EACH ROW SET NEW.at = UNIX_TIMESTAMP(SYSDATE(6))",
    )
    triggers = tuple(
        text.replace("{n}", "LOWER(HEX(NEW.id))")
        .replace("{o}", "LOWER(HEX(OLD.id))")
        .replace("{a}", "LOWER(HEX(NEW.event_id))")
        .replace("{key}", "`key`")
        .replace("{until}", "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', NEW.lease_until) / 1e6")
        for text in _plain_triggers(
            "(SELECT token FROM outbox_lease WHERE stream = NEW.stream AND shard = NEW.shard)",
            "NOT (OLD.status <=> NEW.status AND OLD.attempts <=> NEW.attempts) AND",
            "CREATE TRIGGER {name} AFTER {when} ON outbox_{table} FOR EACH ROW "
            "BEGIN IF {condition} TRUE THEN {insert}; END IF; END",
        )
    )

    def __init__(self, folder: Path, url: str | None = None) -> None:
        super().__init__(folder, url)
        self._server = None if url else MySQL().start()

    def connect(self) -> Any:
        parts = urlsplit(self.url)
        return pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=parts.username,
            database=parts.path[1:],
            connect_timeout=5,
        )

    def cut_sessions(self) -> None:
        connection = self.connect()
        cursor = connection.cursor()
        cursor.execute(
            "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND user <> 'system user'"
        )
        for (number,) in cursor.fetchall():
            with suppress(pymysql.Error):
                cursor.execute(f"KILL {number}")
        connection.close()

    def sample(self) -> tuple[int, float, int]:
        text = f"""SELECT count(*), COALESCE(TIMESTAMPDIFF(MICROSECOND, min(created_at), UTC_TIMESTAMP(6)), 0) / 1e6
            FROM outbox_event WHERE {_WAITING}"""
        ((count, oldest),) = self.query(text)
        ((connections,),) = self.query("SELECT count(*) FROM information_schema.processlist")
        return int(count), float(oldest), int(connections)

    def version(self) -> str:
        return f"MySQL {self.query('SELECT VERSION()')[0][0]}"


class SqliteProof(SqlProof):
    """By the standard library."""

    name = "sqlite"
    can_restart = False
    mark = "?"
    business = (
        "CREATE TABLE proof_key (k text PRIMARY KEY, n integer NOT NULL)",
        "CREATE TABLE proof_witness (event_id text PRIMARY KEY, k text, n integer, sha256 text, fate text)",
        """CREATE TABLE proof_change (seq integer PRIMARY KEY AUTOINCREMENT,
            at real NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0), kind text, stream text, shard integer,
            event_id text, k text, old text, new text, attempts integer, owner text, token integer, until text)""",
    )
    triggers = tuple(
        text.replace("{n}", "NEW.id")
        .replace("{o}", "OLD.id")
        .replace("{a}", "NEW.event_id")
        .replace("{key}", "key")
        .replace("{until}", "NEW.lease_until")
        for text in _plain_triggers(
            "(SELECT token FROM outbox_lease WHERE stream = NEW.stream AND shard = NEW.shard)",
            "(OLD.status IS NOT NEW.status OR OLD.attempts IS NOT NEW.attempts) AND",
            "CREATE TRIGGER {name} AFTER {when} ON outbox_{table} FOR EACH ROW WHEN {condition} 1 BEGIN {insert}; END",
        )
    )

    @property
    def path(self) -> Path:
        return self.folder / "shop.db"

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    def through(self, port: int) -> str:
        return self.url

    def connect(self) -> Any:
        return sqlite3.connect(self.path, timeout=30)

    def cut_sessions(self) -> None:
        """There are none."""

    def sample(self) -> tuple[int, float, int]:
        text = f"""SELECT count(*), COALESCE((julianday('now') - julianday(min(created_at))) * 86400.0, 0)
            FROM outbox_event WHERE {_WAITING}"""
        ((count, oldest),) = self.query(text)
        return int(count), float(oldest), 0

    def version(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}"
