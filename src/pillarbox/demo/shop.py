"""The shop of the demo: its two databases, its orders, and a snapshot of both."""

import asyncio
import random
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from pillarbox.demo.proof import Delivery
from pillarbox.outbox import Outbox
from pillarbox.stores.sqlite import SqliteStore

_CUSTOMERS: Final = 20
_ROLLED_BACK_EVERY: Final = 5
_PAUSE_SECONDS: Final = 0.002
_BUSY_SECONDS: Final = 10.0


class Files(NamedTuple):
    """The paths of the shop's database, which has the outbox, and of the ledger of deliveries."""

    shop: str
    ledger: str

    @classmethod
    def in_folder(cls, folder: Path) -> "Files":
        return cls(str(folder / "shop.db"), str(folder / "ledger.db"))

    def make(self) -> None:
        asyncio.run(self._migrate())
        with closing(sqlite3.connect(self.shop, isolation_level=None)) as shop:
            shop.execute("CREATE TABLE customer (name TEXT PRIMARY KEY, orders INTEGER NOT NULL)")
            shop.execute("CREATE TABLE placed (event_id TEXT PRIMARY KEY)")
            shop.executemany("INSERT INTO customer VALUES (?, 0)", [(f"customer-{n}",) for n in range(_CUSTOMERS)])
        with closing(sqlite3.connect(self.ledger, isolation_level=None)) as ledger:
            ledger.execute("PRAGMA journal_mode = WAL")
            ledger.execute(
                "CREATE TABLE delivery (n INTEGER PRIMARY KEY, event_id TEXT, key TEXT, number INTEGER, worker TEXT)"
            )

    async def _migrate(self) -> None:
        store = SqliteStore(self.shop)
        try:
            await store.migrate()
        finally:
            await store.close()


class Shop(threading.Thread):
    """Takes orders: each is a row and an event in one transaction, and every fifth is rolled back."""

    def __init__(self, path: str) -> None:
        super().__init__(name="shop")
        self.path = path
        self.committed = self.rolled_back = 0
        self.closed = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with closing(sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_SECONDS)) as connection:
                self._take_orders(connection)
        except Exception as error:
            self.error = error

    def _take_orders(self, connection: sqlite3.Connection) -> None:
        outbox, dice = Outbox(), random.Random(1)
        while not self.closed.wait(_PAUSE_SECONDS):
            customer = f"customer-{dice.randrange(_CUSTOMERS)}"
            connection.execute("BEGIN IMMEDIATE")
            (number,) = connection.execute(
                "UPDATE customer SET orders = orders + 1 WHERE name = ? RETURNING orders", (customer,)
            ).fetchone()
            event = outbox.add(connection, "order.placed", {"customer": customer, "number": number}, key=customer)
            connection.execute("INSERT INTO placed (event_id) VALUES (?)", (str(event.id),))
            if (self.committed + self.rolled_back) % _ROLLED_BACK_EVERY == _ROLLED_BACK_EVERY - 1:
                connection.execute("ROLLBACK")
                self.rolled_back += 1
            else:
                connection.execute("COMMIT")
                self.committed += 1


class Snapshot(NamedTuple):
    """The contents of both databases at one moment."""

    states: dict[str, int]  # events by status
    lag_seconds: float  # age of the oldest waiting event
    owners: tuple[str, ...]  # of each shard; empty: nobody
    delivered: dict[str, int]  # by worker, copies included
    copies: int

    @property
    def waiting(self) -> int:
        return sum(count for state, count in self.states.items() if state not in ("published", "dead"))


class Window:
    """Reads both databases."""

    def __init__(self, files: Files) -> None:
        self._shop = sqlite3.connect(files.shop, isolation_level=None, timeout=_BUSY_SECONDS)
        self._shop.execute("ATTACH DATABASE ? AS ledger", (files.ledger,))

    def close(self) -> None:
        self._shop.close()

    def snapshot(self) -> Snapshot:
        ask = self._shop.execute
        states = dict(ask("SELECT status, count(*) FROM outbox_event GROUP BY status").fetchall())
        ((dead,),) = ask("SELECT count(*) FROM outbox_dead_letter").fetchall()
        ((lag,),) = ask(
            """SELECT coalesce((julianday('now') - julianday(min(created_at))) * 86400, 0)
            FROM outbox_event WHERE status <> 'published'"""
        ).fetchall()
        owners = ask("SELECT coalesce(owner, '') FROM outbox_lease WHERE stream = 'default' ORDER BY shard").fetchall()
        return Snapshot(
            states={**states, "dead": dead},
            lag_seconds=max(0.0, lag),
            owners=tuple(owner for (owner,) in owners),
            delivered=dict(ask("SELECT worker, count(*) FROM ledger.delivery GROUP BY worker").fetchall()),
            copies=ask("SELECT count(*) - count(DISTINCT event_id) FROM ledger.delivery").fetchone()[0],
        )

    def in_flight(self, worker: str) -> int:
        """The number of events that this worker has delivered and not yet settled."""
        question = """SELECT count(DISTINCT event_id) FROM ledger.delivery JOIN outbox_event ON id = event_id
            WHERE worker = ? AND status <> 'published'"""
        return int(self._shop.execute(question, (worker,)).fetchone()[0])

    def placed(self) -> set[str]:
        return {event_id for (event_id,) in self._shop.execute("SELECT event_id FROM placed")}

    def deliveries(self) -> list[Delivery]:
        rows = self._shop.execute("SELECT event_id, key, number FROM ledger.delivery ORDER BY n")
        return [Delivery(*row) for row in rows]
