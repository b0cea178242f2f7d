"""A PyMongo session, plain or asynchronous; for writes without a transaction also a client, database or collection."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, Final, NamedTuple

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import BulkWriteError, ConfigurationError, ConnectionFailure, DuplicateKeyError, PyMongoError
from pymongo.read_concern import ReadConcern

from pillarbox.drivers.contract import OUTBOX, Driver, Feature, settled, unknown_handle
from pillarbox.errors import ConfigError, NotInTransaction
from pillarbox.sql.dialects import ErrorKind

_CODEC: Final[CodecOptions[Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
_DUPLICATE_KEY: Final = 11000
_BY_ID: Final = {"_id": 1}
_OUT_OF_TIME: Final = 50
# the same limit as in PyMongo's with_transaction
_COMMIT_SECONDS: Final = 120.0
_LABELS: Final = (
    "TransientTransactionError",
    "UnknownTransactionCommitResult",
    "RetryableWriteError",
    "NoWritesPerformed",
)


class Call(NamedTuple):
    """A call of a collection's method. Steps for MongoDB yield it and are sent its result; ``find`` gives a list."""

    database: str | None  # None: the handle's, else the one in the client's URL
    collection: str
    method: str
    arguments: Sequence[Any]
    # Run in a session of its own, outside the caller's transaction and snapshot; reads only what cannot be rolled back.
    is_outside: bool = False


class PyMongo(Driver):
    family = "mongo"
    needs_transaction = False
    handle_name = "PyMongo session"
    remedy = "open a transaction with `with session.start_transaction():` or `session.with_transaction`"

    def __init__(self, client: Any, session: Any = None, database: str | None = None) -> None:
        self.client = client
        self.session = session
        self.is_pool = session is None and database is None
        self._database = database

    @property
    def places(self) -> int | None:  # type: ignore[override]
        return self.client.options.pool_options.max_pool_size or None

    @property
    def database(self) -> str:
        """The database that the handle names, else the one in the client's URL."""
        if self._database is None:
            try:
                self._database = str(self.client.get_default_database().name)
            except ConfigurationError:
                raise ConfigError(
                    "Pillarbox does not know the database; name it with schema=..., or in the client's URL: "
                    "mongodb://host/database"
                ) from None
        return self._database

    def in_transaction(self) -> bool:
        return self.session is not None and bool(self.session.in_transaction)

    def check(self, feature: Feature = OUTBOX) -> None:
        if self.session is None:
            raise ConfigError(f"a client, database or collection has no transaction; {feature.on_client}")
        super().check(feature)

    def refuse_standalone(self, feature: str, remedy: str = "") -> None:
        """Raise ConfigError if the server is known to have no transactions; asked after a first command."""
        servers = self.client.topology_description.server_descriptions().values()
        if any(server.server_type_name == "Standalone" for server in servers):
            raise ConfigError(
                f"{feature} transactions, which a standalone MongoDB server does not have; make it a replica set, "
                f"which may have one member{remedy}"
            )

    def ask(self, call: Call) -> Any:
        try:
            if not call.is_outside:
                return self._call(call, self.session)
            with self.client.start_session() as own:
                return self._call(call, own)
        except BulkWriteError as error:
            failure = error
        # Outside the except block: PyMongo's error quotes documents and must not become the context of ours.
        raise _without_documents(failure)

    def _call(self, call: Call, session: Any) -> Any:
        # Set explicitly: the caller's client may use another form of UUIDs, secondaries or no acknowledgement. Inside a
        # transaction the transaction's own concerns apply.
        collection = self.client.get_database(call.database or self.database).get_collection(
            call.collection,
            codec_options=_CODEC,
            read_preference=ReadPreference.PRIMARY,
            write_concern=WriteConcern(w="majority"),
            read_concern=ReadConcern("majority") if call.is_outside else None,
        )
        result = getattr(collection, call.method)(*call.arguments, session=session)
        return result.to_list() if call.method == "find" else result

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        if self.session is None and self._database is not None:
            raise ConfigError("a transaction belongs to a client or a session; pass the client")
        if self.in_transaction():
            raise ConfigError(
                "this session has a transaction open, and MongoDB has no savepoints; work in that one, "
                "or pass the client"
            )
        session = self.session or self.client.start_session()
        try:
            # Whatever the client's defaults are: reads of a secondary fail, and without a majority a failover takes the
            # commit back.
            await settled(
                session.start_transaction(
                    read_preference=ReadPreference.PRIMARY, write_concern=WriteConcern(w="majority")
                )
            )
            try:
                yield session
            except BaseException:
                if session.in_transaction:
                    await settled(session.abort_transaction())
                raise
            if session.in_transaction:  # else the block has ended it
                await _commit(session)
        finally:
            if session is not self.session:
                await settled(session.end_session())

    def classify(self, error: BaseException) -> ErrorKind:
        """A duplicate is one of an ``_id``, not one of a unique index that the application may have added."""
        if isinstance(error, ConnectionFailure):
            return ErrorKind.AWAY
        if isinstance(error, PyMongoError) and error.has_error_label("TransientTransactionError"):
            return ErrorKind.CONFLICT
        if not isinstance(error, BulkWriteError | DuplicateKeyError) or error.details is None:
            return ErrorKind.OTHER
        refused = (error.details.get("writeErrors") or [error.details])[0]
        is_duplicate = refused.get("code") == _DUPLICATE_KEY and refused.get("keyPattern", _BY_ID) == _BY_ID
        is_known = not error.details.get("writeConcernErrors")
        return ErrorKind.DUPLICATE if is_duplicate and is_known else ErrorKind.OTHER


class PyMongoAsync(PyMongo):
    is_awaited = True
    remedy = "open a transaction with `async with await session.start_transaction():` or `session.with_transaction`"

    async def ask(self, call: Call) -> Any:
        try:
            if not call.is_outside:
                return await self._call(call, self.session)
            async with self.client.start_session() as own:
                return await self._call(call, own)
        except BulkWriteError as error:
            failure = error
        raise _without_documents(failure)

    def abandon(self) -> None:
        """Make the session refuse to commit. It can still abort, as it does when it ends. An abort here would have to
        be awaited, and with_transaction repeats a transaction that the server ended.
        """
        if self.in_transaction():
            self.session.commit_transaction = _refuse


async def _commit(session: ClientSession | AsyncClientSession) -> None:
    deadline = monotonic() + _COMMIT_SECONDS
    while True:
        try:
            await settled(session.commit_transaction())
        except PyMongoError as error:
            is_unknown = error.has_error_label("UnknownTransactionCommitResult")
            if not is_unknown or getattr(error, "code", None) == _OUT_OF_TIME or monotonic() > deadline:
                raise
        else:
            return


async def _refuse() -> None:
    raise NotInTransaction(
        "outbox.add was not awaited in this transaction, which must not commit without its event; "
        "write `await outbox.add(...)`"
    )


def _without_documents(error: BulkWriteError) -> BulkWriteError:
    """The same error without payloads; its labels still tell with_transaction what to do."""
    kept = ("index", "code", "errmsg", "keyPattern")
    failures = [{name: each[name] for name in kept if name in each} for each in error.details["writeErrors"]]
    labels = [label for label in _LABELS if error.has_error_label(label)]
    return BulkWriteError({**error.details, "writeErrors": failures, "errorLabels": labels})


def driver(handle: Any) -> Driver:
    session = database = None
    if isinstance(handle, ClientSession | AsyncClientSession):
        session, client = handle, handle.client
    elif isinstance(handle, Database | AsyncDatabase):
        client, database = handle.client, handle.name
    elif isinstance(handle, Collection | AsyncCollection):
        client, database = handle.database.client, handle.database.name
    elif isinstance(handle, MongoClient | AsyncMongoClient):
        client = handle
    else:
        raise unknown_handle(handle, "pass a session")
    made = PyMongoAsync if isinstance(client, AsyncMongoClient) else PyMongo
    return made(client, session, database)
