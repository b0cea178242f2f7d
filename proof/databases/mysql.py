"""MySQL, by PyMySQL."""

from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pymysql

from proof.databases.sql import WAITING, SqlProof
from proof.databases.triggers import Spelling


class MysqlProof(SqlProof):
    """By PyMySQL."""

    name = "mysql"
    business = (
        "CREATE TABLE proof_key (k varchar(255) PRIMARY KEY, n bigint NOT NULL) ENGINE=InnoDB",
        """CREATE TABLE proof_witness (event_id varchar(36) PRIMARY KEY, k varchar(255), n bigint, sha256 varchar(64),
            fate varchar(20)) ENGINE=InnoDB""",
        "CREATE TABLE proof_effect (event_id varchar(36)) ENGINE=InnoDB",
        "CREATE TABLE proof_request (k varchar(20), body varchar(20), answer varchar(36)) ENGINE=InnoDB",
        """CREATE TABLE proof_change (seq bigint AUTO_INCREMENT PRIMARY KEY, at double NOT NULL,
            kind varchar(20), stream varchar(100), shard int, event_id varchar(36), k varchar(255), old varchar(20),
            new varchar(20), attempts int, owner varchar(255), token bigint, until double) ENGINE=InnoDB""",
        "CREATE TRIGGER proof_clock BEFORE INSERT ON proof_change FOR EACH ROW SET NEW.at = UNIX_TIMESTAMP(SYSDATE(6))",
    )
    lock = ("SET lock_wait_timeout = 1", "LOCK TABLES outbox_event WRITE")
    Error = pymysql.Error
    triggers = tuple(
        Spelling(
            key="`key`",
            id="LOWER(HEX({}))",
            until="TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {}) / 1e6",
            differ="NOT ({} <=> {})",
            trigger="CREATE TRIGGER {name} AFTER {when} ON outbox_{table} FOR EACH ROW "
            "BEGIN IF {condition} THEN {log}; END IF; END",
        ).triggers()
    )

    def __init__(self, folder: Path, url: str | None = None) -> None:
        super().__init__(folder, url)
        if url is None:
            from servers import MySQL

            self._server = MySQL().start()

    def connect(self) -> Any:
        parts = urlsplit(self.url)
        return pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=parts.username,
            database=parts.path[1:],
            connect_timeout=5,
            ssl_disabled=True,  # each handler has its own connection, and a handshake takes ten times as long
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
        since = "min(GREATEST(created_at, COALESCE(last_error_at, created_at)))"
        text = f"""SELECT count(*), COALESCE(TIMESTAMPDIFF(MICROSECOND, {since}, UTC_TIMESTAMP(6)), 0) / 1e6
            FROM outbox_event WHERE {WAITING.format(key="`key`")}"""
        ((count, oldest),) = self.query(text)
        ((connections,),) = self.query("SELECT count(*) FROM information_schema.processlist")
        return int(count), float(oldest), int(connections)

    def version(self) -> str:
        return f"MySQL {self.query('SELECT VERSION()')[0][0]}"
