"""SQLite, by the standard library."""

import sqlite3
from pathlib import Path
from typing import Any

from proof.databases.sql import WAITING, SqlProof
from proof.databases.triggers import Spelling


class SqliteProof(SqlProof):
    """By the standard library."""

    name = "sqlite"
    can_restart = False
    has_own_clock = False
    mark = "?"
    business = (
        "CREATE TABLE proof_key (k text PRIMARY KEY, n integer NOT NULL)",
        "CREATE TABLE proof_witness (event_id text PRIMARY KEY, k text, n integer, sha256 text, fate text)",
        "CREATE TABLE proof_effect (event_id text)",
        "CREATE TABLE proof_request (k text, body text, answer text)",
        """CREATE TABLE proof_change (seq integer PRIMARY KEY AUTOINCREMENT,
            at real NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0), kind text, stream text, shard integer,
            event_id text, k text, old text, new text, attempts integer, owner text, token integer, until text)""",
    )
    lock = ("PRAGMA busy_timeout = 1000", "BEGIN IMMEDIATE")
    Error = sqlite3.Error
    triggers = tuple(
        Spelling(
            key="key",
            id="{}",
            until="{}",
            differ="{} IS NOT {}",
            trigger="CREATE TRIGGER {name} AFTER {when} ON outbox_{table} FOR EACH ROW WHEN {condition} "
            "BEGIN {log}; END",
        ).triggers()
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
        since = "min(max(created_at, COALESCE(last_error_at, created_at)))"
        text = f"""SELECT count(*), COALESCE((julianday('now') - julianday({since})) * 86400.0, 0)
            FROM outbox_event WHERE {WAITING.format(key="key")}"""
        ((count, oldest),) = self.query(text)
        return int(count), float(oldest), 0

    def version(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}"
