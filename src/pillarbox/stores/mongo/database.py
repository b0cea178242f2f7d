"""The collections of one outbox on MongoDB, with sessions and transactions."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from datetime import datetime
from typing import Final, TypeAlias, TypeVar

import pymongo
from bson import Timestamp
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import ReadPreference, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.read_concern import ReadConcern

from pillarbox.errors import StoreDown
from pillarbox.mongo.documents import Document
from pillarbox.mongo.schema import COLLECTIONS, META_ID, collection
from pillarbox.stores.mongo import clients
from pillarbox.stores.mongo.errors import store_errors
from pillarbox.stores.outbox_info import OutboxInfo
from pillarbox.tasks import PerLoop, run_to_completion

log = logging.getLogger("pillarbox.stores.mongo")

T = TypeVar("T")
Collection: TypeAlias = AsyncCollection[Document]
Session: TypeAlias = AsyncClientSession

# AUTO: an instant that Python cannot hold is another type, and no error of the whole page.
CODEC: Final[CodecOptions[Document]] = CodecOptions(
    uuid_representation=UuidRepresentation.STANDARD,
    tz_aware=True,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)
_BYTES: Final[CodecOptions[Document]] = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_AUTO)
_MAJORITY: Final = WriteConcern("majority")
_STEADY: Final = (ReadConcern("snapshot"), _MAJORITY, ReadPreference.PRIMARY)  # of a transaction
STANDALONE: Final = (
    "%s is a standalone server, without transactions and change streams. An event and its data are written one after "
    "the other: after a crash between them the event is missing until a reconciler finds it. A settle is not one step: "
    "after a crash in it, or when a lease runs out meanwhile, an event can be published again, or after a later one of "
    "its key. Relays poll. A replica set, even of one node, has none of this"
)


class MongoDatabase:
    """The collections of one outbox. Codec and concerns are set on its database, never on the client.

    replicated: whether the server has transactions, known once it is open.
    """

    def __init__(self, source: clients.OwnClient | clients.GivenClient, name: str, outbox: OutboxInfo) -> None:
        self.name = name
        self.outbox = outbox
        self.names = {name: collection(outbox.names, name) for name in (*COLLECTIONS, "meta")}
        self.replicated = True
        self.source = source
        self._opened: AsyncDatabase[Document] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = PerLoop(asyncio.Lock)
        # The latest cluster time that this store has seen. A new primary may not know yet that a majority has it.
        self._seen: Timestamp | None = None
        self._warned = False

    async def open(self) -> None:
        """Safe to call twice."""
        async with self._opening():
            loop = asyncio.get_running_loop()
            if self._opened is not None and self._loop is loop:
                return
            with store_errors(self.outbox.description):
                client = self.source.get()
                try:
                    with pymongo.timeout(clients.CONNECT_SECONDS):
                        hello = await client.admin.command("hello", codec_options=CODEC)
                except BaseException:
                    await self.source.release(client)
                    raise
            self._loop = loop  # a client belongs to its event loop
            self.replicated = "setName" in hello or hello.get("msg") == "isdbgrid"
            self._opened = client.get_database(
                self.name,
                codec_options=CODEC,
                read_preference=ReadPreference.PRIMARY,
                write_concern=_MAJORITY,
                read_concern=ReadConcern("majority" if self.replicated else "local"),
            )

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await self.source.release(opened.client)

    def warn(self) -> None:
        """Log once which promises are weaker on a server without transactions."""
        if not self.replicated and not self._warned:
            log.warning(STANDALONE, self.outbox.description, extra={"action": "standalone"})
            self._warned = True

    @property
    def opened(self) -> AsyncDatabase[Document]:
        if self._opened is None:
            raise StoreDown(f"{self.outbox.description} is closed; open the store first")
        return self._opened

    def collection(self, name: str) -> Collection:
        return self.opened[self.names[name]]

    def snapshot(self, name: str) -> Collection:
        """The collection as it was at one instant. Ids are read as bytes, instants without a zone.

        A majority read can move forward between two pages, and find the second event of a key without the first."""
        concern = ReadConcern("snapshot") if self.replicated else None
        return self.collection(name).with_options(codec_options=_BYTES, read_concern=concern)

    def errors(self) -> AbstractContextManager[None]:
        """Replace errors of the driver by ours."""
        return store_errors(self.outbox.description)

    @contextmanager
    def commands(self, seconds: float | None = None) -> Iterator[None]:
        """Limit the time of the commands inside (default: 30 seconds), and replace errors of the driver by ours."""
        with self.errors(), pymongo.timeout(seconds or clients.COMMAND_SECONDS):
            yield

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A session whose reads come after all that this store has seen."""
        with self.commands():
            async with self.new_session() as session:
                with self._after_what_was_seen(session):
                    yield session

    def new_session(self) -> Session:
        return self.opened.client.start_session(causal_consistency=True)

    @contextmanager
    def _after_what_was_seen(self, session: Session) -> Iterator[None]:
        if self._seen is not None:
            session.advance_operation_time(self._seen)
        try:
            yield
        finally:
            seen = session.operation_time
            if seen is not None and (self._seen is None or seen > self._seen):
                self._seen = seen

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session | None]:
        """A session with a transaction, for writers; none where the server has no transactions."""
        with self.errors():
            if not self.replicated:
                yield None
                return
            async with self.new_session() as session:
                with self._after_what_was_seen(session):
                    async with await session.start_transaction(*_STEADY):
                        yield session

    async def transact(self, work: Callable[[Session | None], Awaitable[T]], session: Session | None = None) -> T:
        """Run ``work`` in a transaction, and again after a conflict. A standalone server runs it without one."""
        if not self.replicated:
            with self.commands():
                return await work(None)
        if session is None:
            async with self.session() as own:
                return await self._transact(work, own)
        with self.commands(), self._after_what_was_seen(session):
            return await self._transact(work, session)

    async def _transact(self, work: Callable[[Session | None], Awaitable[T]], session: Session) -> T:
        return await run_to_completion(session.with_transaction(work, *_STEADY))

    async def version(self) -> int:
        """The version of the outbox, 0 if there is none. Learns its number of shards."""
        with self.commands():
            meta = await self.collection("meta").find_one({"_id": META_ID})
        if meta is None:
            return 0
        self.outbox.shards = int(meta["shards"])
        return int(meta["version"])

    async def clock(self) -> datetime:
        """The server's time."""
        with self.commands():
            answer = await self.opened.command("hello", codec_options=CODEC)
        instant: datetime = answer["localTime"]
        return instant
