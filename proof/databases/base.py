"""What a run asks of a database."""

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
from pillarbox.store import Store
from pillarbox.urls import store_from_url
from proof.content import INVALID, stream_of
from proof.history import Change, Final, Witness
from proof.planted import plant

if TYPE_CHECKING:  # a writer needs no server, and to import all of them takes longer than its first transaction
    from tests.servers import Server


class Written(NamedTuple):
    """An event of a business transaction, to be added."""

    key: str
    fate: str
    size: int
    invalid: int | None = None  # before it one that is refused, by its place in INVALID


class Writer(ABC):
    """One client of the application; every call is one business transaction."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self.wait: Callable[[float], object] = time.sleep  # with its transaction open

    def _add(self, tx: Any, each: Written, event_id: UUID, mark: str, body: bytes) -> None:
        if each.invalid is not None:
            data, fields = INVALID[each.invalid]
            # One that is taken all the same has no witness, and is found by that.
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
        """How its client saw it end (ok, failed, rolled_back or unknown), and the ids of its events."""

    @abstractmethod
    def close(self) -> None: ...


class Database(ABC):
    """A server, the business tables in it and an outbox whose changes the database logs by itself."""

    name: ClassVar[str]
    can_restart: ClassVar[bool] = True
    has_own_clock: ClassVar[bool] = True  # and not that of whichever process asks

    def __init__(self, folder: Path, url: str | None = None) -> None:
        """With the URL of one that runs already it is for a client, and starts no server."""
        self.folder = folder
        self._url = url

    @property
    @abstractmethod
    def server(self) -> "Server | None": ...

    @property
    @abstractmethod
    def url(self) -> str:
        """For stores and writers."""

    @abstractmethod
    def through(self, port: int) -> str:
        """The same through a proxy."""

    @property
    def port(self) -> int | None:
        """Where a proxy leads to; none where no proxy can stand before it."""
        return None if self.server is None else self.server.port

    @abstractmethod
    def prepare(self, keys: Sequence[str]) -> None:
        """Make the outbox, the business tables and the log."""

    @abstractmethod
    def writer(self, planted: str | None = None) -> Writer: ...

    @abstractmethod
    def cut_sessions(self) -> None:
        """End every connection of a relay or a writer."""

    def locked(self) -> AbstractContextManager[bool]:
        """Nobody else can write into the outbox; false: it could not be had soon, or there is no such lock."""
        return nullcontext(False)

    @abstractmethod
    def sample(self) -> tuple[int, float, int]:
        """Waiting events, the age of the oldest in seconds, connections to the server.

        What failed is as old as its last error: a dead event that is replayed has not waited since it was written.
        """

    @abstractmethod
    def witness(self) -> Iterable[Witness]: ...

    @abstractmethod
    def changes(self) -> Iterable[Change]: ...

    @abstractmethod
    def final(self) -> Final: ...

    @abstractmethod
    def version(self) -> str: ...

    def crash(self) -> None:
        """The server is gone without a word, until ``come_back``."""
        if self.server is not None:
            self.server.kill()

    def come_back(self) -> None:
        if self.server is not None:
            self.server.start()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    def ask(self, work: Any, planted: str | None = None) -> Any:
        """Let ``work(store)`` run on a store of its own, as an operator would."""

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
