"""Shared by PostgreSQL, MySQL and SQLite: triggers log each change of the outbox with the database's clock."""

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, ClassVar
from uuid import UUID

from pillarbox.ids import uuid7
from proof.content import fingerprint, payload, sha256_of, stream_of
from proof.databases.base import Database, Writer, Written
from proof.history import Change, Effect, Final, Requested, Witness
from proof.planted import EVENT_IN_A_TRANSACTION_OF_ITS_OWN

_COLUMNS = "kind, stream, shard, event_id, k, old, new, attempts, owner, token, until"
# The events of a blocked key wait for an operator, not for a relay.
WAITING = """status IN ('pending', 'failed', 'held', 'processing') AND NOT EXISTS (SELECT 1 FROM outbox_held_key AS b
    WHERE b.stream = outbox_event.stream AND b.{key} = outbox_event.{key} AND b.mode = 'blocked')"""


class SqlWriter(Writer):
    """A client whose transaction locks its keys, adds events, and writes the witness."""

    def __init__(self, database: "SqlProof", planted: str | None = None) -> None:
        super().__init__(database, planted)
        self._sql = database
        self._connection: Any = None

    def transact(self, wanted: Sequence[Written], *, commit: bool, hold_seconds: float) -> tuple[str, list[str]]:
        ids: list[str] = []
        try:
            connection = self._connection = self._connection or self._sql.connect()
            # Sorted, so that two clients never deadlock.
            ids.extend(self._write(connection, each) for each in sorted(wanted))
            if hold_seconds:
                self.wait(hold_seconds)
            if not commit:
                connection.rollback()
                if self._planted == EVENT_IN_A_TRANSACTION_OF_ITS_OWN:
                    self._add(connection, wanted[0], UUID(ids[0]), "", b"{}")
                    connection.commit()
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

    def _write(self, tx: Any, each: Written) -> str:
        execute, cursor = self._sql.execute, tx.cursor()
        execute(cursor, "UPDATE proof_key SET n = n + 1 WHERE k = %s", each.key)
        execute(cursor, "SELECT n FROM proof_key WHERE k = %s", each.key)
        n = int(cursor.fetchone()[0])
        event_id, mark = uuid7(), f"{each.key}/{n}"
        body = payload(n, each.size, each.fate)
        self._add(tx, each, event_id, mark, body)
        row = (str(event_id), each.key, n, fingerprint(each.key, body, mark), each.fate)
        execute(cursor, "INSERT INTO proof_witness (event_id, k, n, sha256, fate) VALUES (%s, %s, %s, %s, %s)", *row)
        return str(event_id)

    def close(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
            self._connection = None


class SqlProof(Database):
    """A run on a SQL database."""

    business: ClassVar[Sequence[str]]
    triggers: ClassVar[Sequence[str]]
    lock: ClassVar[Sequence[str]]
    mark: ClassVar[str] = "%s"
    Error: ClassVar[type[Exception]]

    _server: Any = None

    @property
    def server(self) -> Any:
        return self._server

    @property
    def url(self) -> str:
        if self._url is not None:
            return self._url
        return str(self._server.url)

    def through(self, port: int) -> str:
        return re.sub(r":\d+/", f":{port}/", self.url)

    @abstractmethod
    def connect(self) -> Any: ...

    def execute(self, cursor: Any, text: str, *values: Any) -> None:
        cursor.execute(text.replace("%s", self.mark), values)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        try:
            connection = self.connect()
        except self.Error:
            yield False
            return
        try:
            yield self._lock(connection)
        finally:
            connection.close()

    def _lock(self, connection: Any) -> bool:
        try:
            for statement in self.lock:
                connection.cursor().execute(statement)
        except self.Error:  # it waited too long for the lock
            return False
        return True

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

    def writer(self, planted: str | None = None) -> Writer:
        return SqlWriter(self, planted)

    def witness(self) -> Iterable[Witness]:
        for event_id, key, n, sha256, fate in self.query("SELECT event_id, k, n, sha256, fate FROM proof_witness"):
            yield Witness(event_id, stream_of(key), key, n, sha256, fate)

    def sessions(self) -> Any:
        return self.connect

    def apply(self, tx: Any, event_id: str) -> None:
        self.execute(tx.cursor(), "INSERT INTO proof_effect (event_id) VALUES (%s)", event_id)

    def effects(self) -> Iterable[Effect]:
        for (event_id,) in self.query("SELECT event_id FROM proof_effect"):
            yield Effect(event_id)

    def keep(self, tx: Any, key: str, body: str, answer: str) -> None:
        self.execute(tx.cursor(), "INSERT INTO proof_request (k, body, answer) VALUES (%s, %s, %s)", key, body, answer)

    def requests(self) -> Iterable[Requested]:
        for key, body, answer in self.query("SELECT k, body, answer FROM proof_request"):
            yield Requested(key, body, sha256_of(answer.encode()))

    def changes(self) -> Iterable[Change]:
        return _without_re_entries(self._logged())

    def _logged(self) -> Iterator[Change]:
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


def _without_re_entries(changes: Iterable[Change]) -> Iterator[Change]:
    """Leave out the delete and the insert of a row that is replaced, so that its event gets a new place.

    SQLite logs no delete then. A dead event is deleted too, right after its dead letter was added.
    """
    rows: set[str] = set()
    dying: set[str] = set()
    deleted: dict[str, Change] = {}
    for change in changes:
        event_id = change.event_id or ""
        if change.kind == "event" and change.old is None:
            is_replaced = event_id in rows or deleted.pop(event_id, None) is not None
            rows.add(event_id)
            if is_replaced:
                continue
        elif event_id in deleted:
            yield deleted.pop(event_id)
        if change.kind == "dead" and change.new is not None:
            dying.add(event_id)
        if change.kind == "event" and change.new is None:
            rows.discard(event_id)
            if change.old != "published" and event_id not in dying:
                deleted[event_id] = change
                continue
            dying.discard(event_id)
        yield change
    yield from deleted.values()


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
