"""The contract between a run and its database."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from uuid import UUID

from pillarbox import Outbox
from pillarbox.errors import InvalidEvent
from pillarbox.idempotency import Idempotency, Reply, Request
from pillarbox.store import Store
from pillarbox.urls import store_from_url
from proof.content import INVALID, stream_of
from proof.history import Change, Effect, Final, Requested, Witness
from proof.planted import plant, plant_in_requests

if TYPE_CHECKING:  # a writer needs no server, and importing them takes longer than its first transaction
    from servers import Server


class Written(NamedTuple):
    """One event that a business transaction adds."""

    key: str
    fate: str
    size: int
    invalid: int | None = None  # an index of INVALID: such an event is tried first, and must be refused


class Writer(ABC):
    """One client of the application. Each call is one business transaction."""

    def __init__(self, database: "Database", planted: str | None = None) -> None:
        self._outbox = Outbox()
        self._database = database
        self._planted = planted
        self._once = Idempotency(database.sessions(), scope=lambda request: "proof")
        plant_in_requests(planted, self._once)
        self.wait: Callable[[float], object] = time.sleep  # called while the transaction is open

    def _add(self, tx: Any, each: Written, event_id: UUID, mark: str, body: bytes) -> None:
        if each.invalid is not None:
            data, fields = INVALID[each.invalid]
            # If it is not refused, the checker finds an event without a witness.
            with suppress(InvalidEvent):
                self._outbox.add(tx, "proof.event", data, **{"key": each.key, "stream": stream_of(each.key), **fields})
        self._outbox.add(
            tx,
            "proof.event",
            body,
            key=each.key,
            stream=stream_of(each.key),
            id=event_id,
            headers={"proof": mark, "fate": each.fate},
            content_type="application/json",
        )

    @abstractmethod
    def transact(self, wanted: Sequence[Written], *, commit: bool, hold_seconds: float) -> tuple[str, list[str]]:
        """The result as the client saw it (ok, failed, rolled_back or unknown), and the ids of the events."""

    def request(
        self, key: str, body: str, wanted: Sequence[Written], *, commit: bool
    ) -> tuple[Reply | None, list[str]]:
        """Send a request with an idempotency key. Its answer is the id of its first event.

        Returns the answer, None if there was none, and the ids of the events that it wrote.
        """
        ids: list[str] = []

        def work(tx: Any) -> tuple[int, Any]:
            ids.extend(self._write(tx, each) for each in sorted(wanted))
            if not commit:
                return 402, None
            self._database.keep(tx, key, body, ids[0])
            return 201, ids[0].encode()

        try:
            reply: Reply = self._once.run(Request("POST", "/orders", body=body.encode(), key=(key,)), work)
        except Exception:
            return None, ids
        return reply, ids

    @abstractmethod
    def _write(self, tx: Any, each: Written) -> str:
        """Write an event and its witness in this transaction. Returns its id."""

    @abstractmethod
    def close(self) -> None: ...


class Database(ABC):
    """A server with business tables, an outbox, and a log that the database itself keeps of its changes."""

    name: ClassVar[str]
    can_restart: ClassVar[bool] = True
    has_own_clock: ClassVar[bool] = True  # SQLite uses the clock of the process that asks

    def __init__(self, folder: Path, url: str | None = None) -> None:
        """``url``: of a server that runs already, for a client. Without it a server is started."""
        self.folder = folder
        self._url = url

    @property
    @abstractmethod
    def server(self) -> "Server | None": ...

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL for stores and writers."""

    @abstractmethod
    def through(self, port: int) -> str:
        """The URL through a proxy on this port."""

    @property
    def port(self) -> int | None:
        """The server's port, for a proxy; None: no proxy is possible."""
        return None if self.server is None else self.server.port

    @abstractmethod
    def prepare(self, keys: Sequence[str]) -> None:
        """Create the outbox, the business tables and the log."""

    @abstractmethod
    def writer(self, planted: str | None = None) -> Writer: ...

    @abstractmethod
    def sessions(self) -> Any:
        """What begins the transactions of handlers and requests: a pool, a client, or a function that connects."""

    @abstractmethod
    def apply(self, tx: Any, event_id: str) -> None:
        """Write the effect of an event in the transaction of its handler. No key keeps it from being there twice."""

    @abstractmethod
    def keep(self, tx: Any, key: str, body: str, answer: str) -> None:
        """Write the effect of a request in its transaction. No unique key keeps it from being there twice."""

    @abstractmethod
    def cut_sessions(self) -> None:
        """End every connection of relays and writers."""

    def locked(self) -> AbstractContextManager[bool]:
        """Lock the outbox against all other writers. False: there is no such lock, or it was not free soon enough."""
        return nullcontext(False)

    @abstractmethod
    def sample(self) -> tuple[int, float, int]:
        """The number of waiting events, the age of the oldest in seconds, and the server's connections.

        The age of a failed event counts from its last error: a replayed event has not waited since it was written.
        """

    @abstractmethod
    def witness(self) -> Iterable[Witness]: ...

    @abstractmethod
    def effects(self) -> Iterable[Effect]: ...

    @abstractmethod
    def requests(self) -> Iterable[Requested]: ...

    @abstractmethod
    def changes(self) -> Iterable[Change]: ...

    @abstractmethod
    def final(self) -> Final: ...

    @abstractmethod
    def version(self) -> str: ...

    def crash(self) -> None:
        """Kill the server; ``come_back`` starts it again."""
        if self.server is not None:
            self.server.kill()

    def come_back(self) -> None:
        if self.server is not None:
            self.server.start()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    def ask(self, work: Any, planted: str | None = None) -> Any:
        """Run ``work(store)`` on a store of its own, as an operator would."""

        async def run() -> Any:
            store: Store = store_from_url(self.url)
            plant(planted, store, SimpleNamespace(publish=None))
            await store.open()
            try:
                return await work(store)
            finally:
                await store.close()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(run())).result()

    def migrate(self) -> None:
        async def run() -> None:
            store: Store = store_from_url(self.url)
            await store.migrate()
            await store.close()

        asyncio.run(run())
