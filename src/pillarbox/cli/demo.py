"""``pillarbox demo``: a shop, a relay that is killed, and the proof that nothing was lost. Needs only SQLite."""

import argparse
import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from pillarbox.outbox import Outbox
from pillarbox.stores.sqlite import SqliteStore

CUSTOMERS = 20
DEADLINE_SECONDS = 20.0


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="see it work on SQLite: a shop, a kill, and the proof")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the shop takes orders (default 8)")
    parser.set_defaults(run=run)


class Proof(NamedTuple):
    """What the two ledgers say when everything is at rest."""

    committed: int
    rolled_back: int
    delivered: int
    lost: int
    phantom: int
    keys_out_of_order: int
    copies: int

    @property
    def holds(self) -> bool:
        return self.committed > 0 and not (self.lost or self.phantom or self.keys_out_of_order)


class Shop(threading.Thread):
    """Takes orders: each is a row and an event in one transaction, and every fifth is rolled back."""

    def __init__(self, path: str) -> None:
        super().__init__(name="shop")
        self.path = path
        self.committed = self.rolled_back = 0
        self.closed = threading.Event()

    def run(self) -> None:
        outbox = Outbox()
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=10)) as connection:
            while not self.closed.wait(0.002):
                customer = f"customer-{random.randrange(CUSTOMERS)}"
                connection.execute("BEGIN IMMEDIATE")
                (number,) = connection.execute(
                    "UPDATE customer SET orders = orders + 1 WHERE name = ? RETURNING orders", (customer,)
                ).fetchone()
                event = outbox.add(connection, "order.placed", {"customer": customer, "number": number}, key=customer)
                connection.execute(
                    "INSERT INTO placed (event_id, key, number) VALUES (?, ?, ?)", (str(event.id), customer, number)
                )
                if random.random() < 0.2:
                    connection.execute("ROLLBACK")
                    self.rolled_back += 1
                else:
                    connection.execute("COMMIT")
                    self.committed += 1


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; exit code 1 if the proof fails."""
    with tempfile.TemporaryDirectory(prefix="pillarbox-demo-") as folder:
        return _Demo(Path(folder), arguments.seconds).run()


class _Demo:
    def __init__(self, folder: Path, seconds: float) -> None:
        self.shop_path, self.ledger_path = str(folder / "shop.db"), str(folder / "ledger.db")
        self.seconds = seconds
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.live = sys.stdout.isatty()

    def run(self) -> int:
        asyncio.run(self._prepare())
        shop = Shop(self.shop_path)
        try:
            self._say("A shop takes orders; each order and its event are one SQLite transaction, some are rolled back.")
            self._start("worker-1")
            self._start("worker-2")
            shop.start()
            self._watch(shop, self.seconds / 3)
            self._kill("worker-1")
            self._watch(shop, self.seconds / 3)
            self._start("worker-3")
            self._watch(shop, self.seconds / 3)
            shop.closed.set()
            shop.join()
            self._say("The shop is closed; what waits is delivered, then the relays stop cleanly.")
            deadline = time.monotonic() + DEADLINE_SECONDS
            while self._waiting() and time.monotonic() < deadline:
                self._watch(shop, 0.25)
        finally:
            shop.closed.set()
            for worker in self.workers.values():
                worker.send_signal(signal.SIGTERM)
            for worker in self.workers.values():
                worker.wait()
        return self._conclude(self._prove(shop))

    async def _prepare(self) -> None:
        store = SqliteStore(self.shop_path)
        await store.migrate()
        await store.close()
        with closing(sqlite3.connect(self.shop_path, isolation_level=None)) as shop:
            shop.execute("CREATE TABLE customer (name TEXT PRIMARY KEY, orders INTEGER NOT NULL)")
            shop.execute("CREATE TABLE placed (event_id TEXT PRIMARY KEY, key TEXT, number INTEGER)")
            shop.executemany("INSERT INTO customer VALUES (?, 0)", [(f"customer-{n}",) for n in range(CUSTOMERS)])
        with closing(sqlite3.connect(self.ledger_path, isolation_level=None)) as ledger:
            ledger.execute("PRAGMA journal_mode = WAL")
            ledger.execute(
                "CREATE TABLE delivery (n INTEGER PRIMARY KEY, event_id TEXT, key TEXT, number INTEGER, worker TEXT)"
            )

    def _start(self, name: str) -> None:
        command = [sys.executable, "-m", "pillarbox.cli._demo_worker", self.shop_path, self.ledger_path, name]
        self.workers[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._say(f"{name} serves the outbox (process {self.workers[name].pid}).")

    def _kill(self, name: str) -> None:
        worker = self.workers.pop(name)
        worker.kill()
        worker.wait()
        self._say(f"{name} was killed with SIGKILL in the middle of its work; its shards are taken over.")

    def _watch(self, shop: Shop, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(0.5, left))
            delivered, waiting, oldest = self._delivered(), self._waiting(), self._oldest()
            line = (
                f"  committed {shop.committed:6,}   rolled back {shop.rolled_back:5,}   delivered {delivered:6,}"
                f"   waiting {waiting:5,}   oldest {oldest:4.1f} s"
            )
            print(f"\r{line}" if self.live else line, end="" if self.live else "\n", flush=True)

    def _say(self, sentence: str) -> None:
        # The live line is overwritten by what is said; without a terminal every line stays.
        print(f"\r{sentence:<100}" if self.live else sentence, flush=True)

    def _ask(self, path: str, question: str) -> Any:
        with closing(sqlite3.connect(path, timeout=10)) as connection:
            return connection.execute(question).fetchone()[0]

    def _delivered(self) -> int:
        return int(self._ask(self.ledger_path, "SELECT count(*) FROM delivery"))

    def _waiting(self) -> int:
        return int(self._ask(self.shop_path, "SELECT count(*) FROM outbox_event WHERE status <> 'published'"))

    def _oldest(self) -> float:
        question = """SELECT coalesce((julianday('now') - julianday(min(created_at))) * 86400, 0)
            FROM outbox_event WHERE status <> 'published'"""
        return max(0.0, float(self._ask(self.shop_path, question)))

    def _prove(self, shop: Shop) -> Proof:
        with closing(sqlite3.connect(self.shop_path)) as connection:
            placed = {row[0] for row in connection.execute("SELECT event_id FROM placed")}
        with closing(sqlite3.connect(self.ledger_path)) as connection:
            deliveries = connection.execute("SELECT event_id, key, number FROM delivery ORDER BY n").fetchall()
        seen: set[str] = set()
        highest: dict[str, int] = {}
        disordered: set[str] = set()
        for event_id, key, number in deliveries:
            if event_id in seen:
                continue
            seen.add(event_id)
            if number != highest.get(key, 0) + 1:
                disordered.add(key)
            highest[key] = number
        return Proof(
            committed=len(placed),
            rolled_back=shop.rolled_back,
            delivered=len(seen),
            lost=len(placed - seen),
            phantom=len(seen - placed),
            keys_out_of_order=len(disordered),
            copies=len(deliveries) - len(seen),
        )

    def _conclude(self, proof: Proof) -> int:
        self._say("")
        print(f"committed                {proof.committed:8,}")
        print(f"delivered                {proof.delivered:8,}   lost: {proof.lost}")
        print(f"rolled back              {proof.rolled_back:8,}   of these delivered: {proof.phantom}")
        print(f"keys out of order        {proof.keys_out_of_order:8,}   of {CUSTOMERS}")
        print(f"copies after the kill    {proof.copies:8,}   at most what the killed worker had in flight")
        print("The promise held." if proof.holds else "THE PROMISE WAS BROKEN: please report this run.")
        return 0 if proof.holds else 1
