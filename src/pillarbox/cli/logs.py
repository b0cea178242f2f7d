"""Logs on standard error: a sentence plus fields."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

from pillarbox.cli import secrets
from pillarbox.operations.records import iso

# Their own lines at DEBUG and INFO contain statements with headers and payloads.
_DRIVERS: Final = (
    "aiosqlite",
    "asyncio",
    "asyncmy",
    "confluent_kafka",
    "django.db",
    "psycopg",
    "pymongo",
    "pymysql",
    "sqlalchemy",
)
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def start(form: str, level: str) -> None:
    """Send all logs to standard error from now on. Those of drivers begin at WARNING."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in _DRIVERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    # While the database is away its pool warns every second, with a traceback. The relay says it once.
    logging.getLogger("asyncpg").setLevel(logging.ERROR)
    # For each connection that ends it warns with a traceback. The relay and the consumer say why in a line.
    logging.getLogger("aiormq").setLevel(logging.ERROR)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _at(record: logging.LogRecord) -> str:
    return iso(datetime.fromtimestamp(record.created, UTC))


class TextFormatter(logging.Formatter):
    """For people: instant, level, sentence, fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{_at(record)} {record.levelname} {record.getMessage()}{'  ' if fields else ''}{fields}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return secrets.masked(line)


class JsonFormatter(logging.Formatter):
    """For machines: an object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "at": _at(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "logger": record.name,
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return secrets.masked(json.dumps(entry, ensure_ascii=False, default=str))
