"""A consumer's application on any driver: tables that all its tests share, since each has events of its own."""

import itertools
import os
from typing import Any, Final

from pillarbox import Event, Inbox, Outbox
from pillarbox.conformance.driver_setup import TYPES, Application, done
from pillarbox.drivers import Driver, Statement, Steps, driver_of
from pillarbox.drivers.contract import Build
from pillarbox.drivers.pymongo import Call
from pillarbox.urls import store_from_url

_numbers = itertools.count(1)
_prefixes: Final[dict[str, str]] = {}  # by the URL of the database


class Desk:
    """The application, its inbox, and the table that has the effects of events."""

    def __init__(self, app: Application, prefix: str) -> None:
        self.app = app
        self.prefix = prefix
        self.table = f"{prefix}_effect"

    @classmethod
    async def open(cls, app: Application) -> "Desk":
        if app.url not in _prefixes:
            prefix = f"desk_{os.getpid()}_{next(_numbers)}"
            store = store_from_url(app.url, prefix=prefix)
            await store.migrate()
            await store.close()
            await cls(app, prefix)._run(_create)
            _prefixes[app.url] = prefix
        return cls(app, _prefixes[app.url])

    def inbox(self, name: str = "mailer") -> Inbox:
        return Inbox(name, prefix=self.prefix)

    def outbox(self) -> Outbox:
        return Outbox(prefix=self.prefix)

    def apply(self, tx: Any, event: Event) -> Any:
        """Write the effect of an event: to be awaited on drivers that are."""
        return driver_of(tx).run(_insert(self.table, str(event.id)))

    async def effects(self, event: Event) -> int:
        """The number of committed effects of an event."""
        return int(await self._run(_count, str(event.id)))

    async def _run(self, build: Any, *values: Any) -> Any:
        """In a transaction and on a connection of its own."""
        own = type(self.app)(self.app.url)
        handle = await own.open()
        try:
            await own.begin()
            result = await done(driver_of(handle).run(build(self.table, *values)))
            await own.commit()
        finally:
            await own.close()
        return result


def _create(table: str) -> Build[None]:
    def steps(driver: Driver) -> Steps[None]:
        if driver.family == "mongo":
            yield Call(None, table, "insert_one", [{"event": ""}])
        else:
            kind = TYPES[driver.dialect.database]["{text}"]
            yield Statement(f"CREATE TABLE {table} (event {kind})")

    return steps


def _insert(table: str, event: str) -> Build[None]:
    def steps(driver: Driver) -> Steps[None]:
        if driver.family == "mongo":
            yield Call(None, table, "insert_one", [{"event": event}])
        else:
            yield Statement(f"INSERT INTO {table} VALUES ({driver.dialect.marks(1)[0]})", [event])

    return steps


def _count(table: str, event: str) -> Build[int]:
    def steps(driver: Driver) -> Steps[int]:
        if driver.family == "mongo":
            return int((yield Call(None, table, "count_documents", [{"event": event}])))
        text = f"SELECT count(*) FROM {table} WHERE event = {driver.dialect.marks(1)[0]}"
        return int((yield Statement(text, [event], has_rows=True)).rows[0][0])

    return steps
