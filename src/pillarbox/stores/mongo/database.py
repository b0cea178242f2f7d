"""PyMongo under the store: one client, sessions that see what was settled before, errors in our words."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import Final, TypeAlias, TypeVar

import pymongo
from bson import Timestamp
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    DuplicateKeyError,
    InvalidOperation,
    InvalidURI,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
)
from pymongo.read_concern import ReadConcern

from pillarbox.errors import ConfigError, DuplicateEvent, SchemaError, StoreDown, StoreError
from pillarbox.names import Names
from pillarbox.stores.mongo.documents import Document
from pillarbox.stores.mongo.schema import COLLECTIONS, collection
from pillarbox.tasks import to_its_end

log = logging.getLogger("pillarbox.stores.mongo")

T = TypeVar("T")
Collection: TypeAlias = AsyncCollection[Document]
Session: TypeAlias = AsyncClientSession

_CONNECT_SECONDS: Final = 10.0
# For a statement, and for a transaction with all its repetitions.
_COMMAND_SECONDS: Final = 30.0
CODEC: Final[CodecOptions[Document]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD, tz_aware=True)
_BYTES: Final[CodecOptions[Document]] = CodecOptions(tz_aware=True)
_MAJORITY: Final = WriteConcern("majority")
_STEADY: Final = (ReadConcern("snapshot"), _MAJORITY, ReadPreference.PRIMARY)  # of a transaction
DUPLICATE: Final = 11000
_AUTHENTICATION: Final = (18, 8000)
_UNAUTHORIZED: Final = 13
_VALIDATION: Final = 121
# No such collection; an index that a read names is not there.
_SCHEMA: Final = (26, 2)
# The server, an election or another transaction was in the way, or a cursor is gone with the node that had it; the same
# can succeed a moment later.
_PASSING: Final = frozenset(
    {43, 133, 175, 237, 261, 282, 365}
    | {6, 7, 24, 46, 50, 64, 89, 91, 100, 112, 134, 189, 202, 211, 217, 225, 239, 244, 246, 251, 262, 263, 290, 317}
    | {9001, 10107, 11600, 11601, 11602, 13435, 13436}
)
_PASSING_LABELS: Final = ("TransientTransactionError", "UnknownTransactionCommitResult", "RetryableWriteError")
STANDALONE: Final = (
    "%s is a standalone server, without transactions and change streams: an event and its data are written one after "
    "the other, so that a crash between them needs a reconciler; a settle is not one step, so that a crash in it, or a "
    "lease that runs out meanwhile, can publish an event again or after a later one of its key; relays poll. A replica "
    "set, of one node too, has none of this"
)


class MongoDatabase:
    """The collections of one outbox; the client lives from open to close, in one event loop."""

    def __init__(self, url: str, name: str, database: str, names: Names) -> None:
        self.name = name
        self.database = database
        self.replicated = True  # known once it is open
        self._url = url
        self.names = {name: collection(names, name) for name in (*COLLECTIONS, "meta")}
        self._client: AsyncMongoClient[Document] | None = None
        self._database: AsyncDatabase[Document] | None = None
        self._opening = asyncio.Lock()
        # The latest instant of the cluster that this store has seen: after an election the new primary can be asked
        # before it knows that all of it is there to stay.
        self._seen: Timestamp | None = None
        self._warned = False

    async def open(self) -> None:
        """Safe to call twice."""
        async with self._opening:
            if self._client is not None:
                return
            with self.errors():
                client: AsyncMongoClient[Document] = AsyncMongoClient(
                    self._url,
                    appname="pillarbox",
                    document_class=dict,
                    uuidRepresentation="standard",
                    tz_aware=True,
                    serverSelectionTimeoutMS=int(_CONNECT_SECONDS * 1000),
                    connectTimeoutMS=int(_CONNECT_SECONDS * 1000),
                    timeoutMS=int(_COMMAND_SECONDS * 1000),
                    retryWrites=True,
                )
                try:
                    with pymongo.timeout(_CONNECT_SECONDS):
                        hello = await client.admin.command("hello")
                except BaseException:
                    await client.close()
                    raise
            self._client = client
            self.replicated = "setName" in hello or hello.get("msg") == "isdbgrid"
            self._database = client.get_database(
                self.database,
                codec_options=CODEC,
                read_preference=ReadPreference.PRIMARY,
                write_concern=_MAJORITY,
                read_concern=ReadConcern("majority" if self.replicated else "local"),
            )

    def warn(self) -> None:
        """Say once what is weaker on a server without transactions."""
        if not self.replicated and not self._warned:
            log.warning(STANDALONE, self.name, extra={"action": "standalone"})
            self._warned = True

    async def close(self) -> None:
        client, self._client, self._database = self._client, None, None
        if client is not None:
            await client.close()

    def collection(self, name: str) -> Collection:
        return self.opened[self.names[name]]

    def steady(self, name: str) -> Collection:
        """The collection as it was at one instant, however many pages a read has: a majority read steps forward between
        them, and would find the second event of a key that committed meanwhile, but not the first. Ids stay bytes."""
        concern = ReadConcern("snapshot") if self.replicated else None
        return self.collection(name).with_options(codec_options=_BYTES, read_concern=concern)

    @property
    def opened(self) -> AsyncDatabase[Document]:
        if self._database is None:
            raise StoreDown(f"{self.name} is closed; open the store first")
        return self._database

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """What is read and written in it comes after all that this store has seen."""
        with self.errors():
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
            self._saw(session)

    def _saw(self, session: Session) -> None:
        seen = session.operation_time
        if seen is not None and (self._seen is None or seen > self._seen):
            self._seen = seen

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Session | None]:
        """For writers: none where the server has no transactions."""
        if not self.replicated:
            with self.errors():
                yield None
            return
        async with self.session() as session, await session.start_transaction(*_STEADY):
            yield session

    async def transact(self, work: Callable[[Session | None], Awaitable[T]], session: Session | None = None) -> T:
        """Run it in a transaction, again when another one was in the way; where there are none, step by step."""
        if not self.replicated:
            with self.errors():
                return await work(None)
        if session is None:
            async with self.session() as own:
                return await self._transact(work, own)
        with self.errors(), self._after_what_was_seen(session):
            return await self._transact(work, session)

    async def _transact(self, work: Callable[[Session | None], Awaitable[T]], session: Session) -> T:
        with pymongo.timeout(_COMMAND_SECONDS):
            return await to_its_end(session.with_transaction(work, *_STEADY))

    async def clock(self) -> datetime:
        with self.errors():
            answer = await self.opened.command("hello", codec_options=CODEC)
        instant: datetime = answer["localTime"]
        return instant

    @contextmanager
    def errors(self) -> Iterator[None]:
        """The driver's errors in our words. Those of a bulk write quote its documents, and are not passed on."""
        try:
            yield
        except (BulkWriteError, OperationFailure) as error:
            code = _code(error)
            cause = None if isinstance(error, BulkWriteError) else error
            if isinstance(error, DuplicateKeyError) or code == DUPLICATE:
                raise DuplicateEvent(
                    "an event with this id is in the outbox already; give another id, or leave it out"
                ) from None
            raise self._refusal(error, code) from cause
        except (InvalidURI, ConfigurationError):
            # Without its words: they can quote the URL.
            raise ConfigError(
                f"{self.name}: the driver does not understand the URL; check its options, such as replicaSet"
            ) from None
        except (ConnectionFailure, InvalidOperation) as error:
            raise StoreDown(f"{self.name} cannot be used now ({type(error).__name__}: {_brief(error)})") from error
        except PyMongoError as error:
            if error.timeout:
                raise StoreDown(f"{self.name} did not answer in time ({type(error).__name__})") from error
            raise StoreError(f"{self.name}: {type(error).__name__}: {_brief(error)}") from error

    def _refusal(self, error: PyMongoError, code: int | None) -> Exception:
        words = f"{type(error).__name__} {code}"
        if isinstance(error, OperationFailure) and not isinstance(error, BulkWriteError):
            words = f"{words}: {_brief(error)}"
        if error.timeout or code in _PASSING or any(map(error.has_error_label, _PASSING_LABELS)):
            return StoreDown(f"{self.name} cannot be used now ({words})")
        if isinstance(error, WriteConcernError):
            return StoreDown(f"{self.name} does not know yet whether a write is there to stay ({words})")
        if code in _AUTHENTICATION:
            return StoreError(f"{self.name}: user or password refused; correct the URL")
        if code == _UNAUTHORIZED:
            return StoreError(f"{self.name}: {words}; grant it to the user of the relay")
        if code == _VALIDATION:
            return StoreError(f"{self.name}: the outbox has another number of shards by now; open the store again")
        if code in _SCHEMA:
            return SchemaError(f"{self.name}: {words}; make the collections with `pillarbox init`")
        return StoreError(f"{self.name}: {words}")


def _code(error: PyMongoError) -> int | None:
    if isinstance(error, BulkWriteError):
        errors = [*error.details.get("writeErrors", ()), *error.details.get("writeConcernErrors", ())]
        return errors[0].get("code") if errors else error.code
    return getattr(error, "code", None)


def _brief(error: PyMongoError) -> str:
    """The first words: a driver adds the state of every server, or the whole answer."""
    details = getattr(error, "details", None)
    text = str(details.get("errmsg") or error) if isinstance(details, dict) else str(error)
    for end in (", Timeout:", ", full error", " (configured timeouts"):
        text = text.split(end)[0]
    return text[:200]
