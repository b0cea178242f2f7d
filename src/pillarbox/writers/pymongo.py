"""Events in the caller's transaction on a PyMongo session, plain or asynchronous."""

from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, UpdateOne, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import BulkWriteError, ConfigurationError, PyMongoError
from pymongo.read_concern import ReadConcern

from pillarbox.errors import ConfigError, NotInTransaction, SchemaError
from pillarbox.event import Event, key_hash
from pillarbox.names import Names
from pillarbox.stores.mongo.documents import encoded
from pillarbox.stores.mongo.schema import META_ID, collection
from pillarbox.writers._statements import duplicate, no_tables, not_in_transaction
from pillarbox.writing import Asked, Batch, Deferred, Question

T = TypeVar("T")
# Yields what a call of the driver returned, and is sent what comes of it: one text for both kinds of driver.
_Steps: TypeAlias = Generator[Any, Any, T]

WITHOUT_TRANSACTIONS: Final = True  # this writer knows Outbox(transactions=False)
_CODEC: Final[CodecOptions[Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
_DUPLICATE_KEY: Final = 11000
_BY_ID: Final = {"_id": 1}
_INVALID_DOCUMENT: Final = 121
_OUT_OF_TIME: Final = 50
_IDS_IN_A_QUESTION: Final = 1000
# As long as PyMongo's with_transaction does.
_COMMIT_SECONDS: Final = 120.0
_LABELS: Final = (
    "TransientTransactionError",
    "UnknownTransactionCommitResult",
    "RetryableWriteError",
    "NoWritesPerformed",
)
_shards_of: "WeakKeyDictionary[Any, dict[tuple[str, str], int]]" = WeakKeyDictionary()


class _Place(NamedTuple):
    """Where an outbox is, and how to get there."""

    client: Any
    session: Any | None
    database: str
    names: Names

    @property
    def in_transaction(self) -> bool:
        return _in_transaction(self.session)

    @property
    def is_awaited(self) -> bool:
        return isinstance(self.client, AsyncMongoClient)

    def collection(self, name: str, read_concern: ReadConcern | None = None) -> Any:
        # All of it said here: the caller's client may be set to another form of UUIDs, to secondaries or to no
        # acknowledgement. Inside of a transaction the transaction's own concerns count.
        return self.client.get_database(self.database).get_collection(
            collection(self.names, name),
            codec_options=_CODEC,
            read_preference=ReadPreference.PRIMARY,
            write_concern=WriteConcern(w="majority"),
            read_concern=read_concern,
        )


def _in_transaction(session: Any | None) -> bool:
    return session is not None and session.in_transaction


def _place(handle: Any, names: Names) -> _Place:
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
        raise ConfigError(f"the outbox cannot write with a {type(handle).__qualname__}; pass a session")
    return _Place(client, session, names.schema or database or _default_database(client), names)


def _default_database(client: Any) -> str:
    try:
        return str(client.get_default_database().name)
    except ConfigurationError:
        raise ConfigError(
            "the outbox does not know its database; name it with Outbox(schema=...), or in the client's URL: "
            "mongodb://host/database"
        ) from None


def _check_transaction(place: _Place, batch: Batch) -> None:
    if place.in_transaction or not batch.transactions:
        return
    if place.session is None:
        raise ConfigError(
            "a client, database or collection has no transaction; pass a session that has one, "
            "or declare the outbox as used without: Outbox(transactions=False)"
        )
    remedy = "`async with await session.start_transaction():`" if place.is_awaited else "`session.start_transaction():`"
    raise not_in_transaction("PyMongo session", f"open a transaction with {remedy} or `session.with_transaction`")


def write(handle: Any, batch: Batch) -> Deferred | None:
    """Insert events, at once or when awaited."""
    place = _place(handle, batch.names)
    _check_transaction(place, batch)
    if place.is_awaited:
        return Deferred(
            lambda: _awaited(_write(place, batch)), lambda: place.in_transaction, partial(_abandon, place.session)
        )
    _at_once(_write(place, batch))
    return None


def exists(handle: Any, asked: Question) -> bool | Asked:
    """Whether the outbox knows this event, at once or when awaited."""
    place = _place(handle, asked.names)
    if place.is_awaited:
        return lambda: _awaited(_exists(place, asked))
    return _at_once(_exists(place, asked))


@asynccontextmanager
async def begin(handle: Any) -> AsyncIterator[Any]:
    """A transaction on a new session of this client, or on this session."""
    async with AsyncExitStack() as stack:
        session = handle
        if isinstance(handle, AsyncMongoClient):
            session = await stack.enter_async_context(handle.start_session())
        if not isinstance(session, AsyncClientSession):
            raise ConfigError(
                "outbox.transaction takes an AsyncMongoClient or an AsyncClientSession; in a transaction of a plain "
                "session call outbox.add"
            )
        if _in_transaction(session):
            raise ConfigError(
                "this session has a transaction open, and MongoDB has no savepoints; await outbox.add in that one"
            )
        await session.start_transaction()
        try:
            yield session
        except BaseException:
            if _in_transaction(session):
                await session.abort_transaction()
            raise
        if _in_transaction(session):  # else the block ended it by itself
            await _commit(session)


async def _commit(session: AsyncClientSession) -> None:
    deadline = monotonic() + _COMMIT_SECONDS
    while True:
        try:
            return await session.commit_transaction()
        except PyMongoError as error:
            is_unknown = error.has_error_label("UnknownTransactionCommitResult")
            if not is_unknown or getattr(error, "code", None) == _OUT_OF_TIME or monotonic() > deadline:
                raise


def _abandon(session: Any | None) -> None:
    """See to it that the transaction cannot commit.

    To abort it would have to be awaited, and one that the server ended would be run again by with_transaction. So the
    session refuses to commit; it can still abort, as it does when it ends.
    """
    if session is not None and _in_transaction(session):
        session.commit_transaction = _refuse


async def _refuse() -> None:
    raise NotInTransaction(
        "outbox.add was not awaited in this transaction, which must not commit without its event; "
        "write `await outbox.add(...)`"
    )


def _at_once(steps: _Steps[T]) -> T:
    try:
        result = next(steps)
        while True:
            result = steps.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


async def _awaited(steps: _Steps[T]) -> T:
    try:
        step = next(steps)
        while True:
            result = failure = None
            try:
                result = await step
            except BaseException as error:
                failure = error
            # Not where it was caught: it may quote documents, and would be the context of what is raised for it.
            step = steps.send(result) if failure is None else steps.throw(failure)
    except StopIteration as end:
        value: T = end.value
        return value


def _write(place: _Place, batch: Batch) -> _Steps[None]:
    _check_transaction(place, batch)  # again: it may have ended before this was awaited
    shards = yield from _shards(place)
    documents = [encoded(event, shards) for event in batch.events]
    if batch.lock_keys:
        yield from _lock_keys(place, batch.events)
    if not batch.ignore_duplicates:
        yield from _insert(place, batch, list(zip(batch.events, documents, strict=True)))
        return
    # Looks first, because a duplicate ends a transaction.
    seen = yield from _known(place, [event.id for event in batch.events])
    added = []
    for event, document in zip(batch.events, documents, strict=True):
        if event.id not in seen:
            seen.add(event.id)
            added.append((event, document))
    yield from _insert(place, batch, added)


def _shards(place: _Place) -> _Steps[int]:
    """The number that the outbox was made with; read once by each client."""
    known = _shards_of.setdefault(place.client, {})
    where = (place.database, place.names.prefix)
    if where not in known:
        # In a session of its own: it must see no snapshot of the caller's, nor become a part of his transaction.
        session = place.client.start_session()
        try:
            meta = place.collection("meta", ReadConcern("majority"))
            found = yield meta.find_one({"_id": META_ID}, session=session)
        finally:
            yield session.end_session()
        if not found or not found["version"]:
            raise no_tables(place.names)
        known[where] = int(found["shards"])
    return known[where]


def _lock_keys(place: _Place, events: Sequence[Event]) -> _Steps[None]:
    """Of two transactions that write the same document the server ends the later one, to be run again."""
    hashes = sorted({key_hash(event.id, event.key) for event in events if event.key is not None})
    touch = {"$currentDate": {"at": True}}
    locks = [UpdateOne({"_id": hashed}, touch, upsert=True) for hashed in hashes]
    if locks:
        yield place.collection("key_lock").bulk_write(locks, session=place.session)


def _known(place: _Place, ids: Sequence[Any]) -> _Steps[set[Any]]:
    events = place.collection("event")
    known: set[Any] = set()
    for start in range(0, len(ids), _IDS_IN_A_QUESTION):
        some = {"_id": {"$in": ids[start : start + _IDS_IN_A_QUESTION]}}
        found = yield events.find(some, {"_id": True}, session=place.session).to_list()
        known.update(each["_id"] for each in found)
    return known


def _insert(place: _Place, batch: Batch, added: Sequence[tuple[Event, RawBSONDocument]]) -> _Steps[None]:
    into = place.collection("event")
    while added:
        try:
            yield into.insert_many([document for _, document in added], session=place.session)
        except BulkWriteError as error:
            failure = error
        else:
            return
        # Out of the handler: the driver's error quotes the documents, and must not be the context of ours.
        refused = (failure.details["writeErrors"] or [{"code": None}])[0]
        if refused["code"] == _INVALID_DOCUMENT:
            raise _other_shards(place)
        # Not of another unique index, which the application may have added.
        is_duplicate = refused["code"] == _DUPLICATE_KEY and refused.get("keyPattern", _BY_ID) == _BY_ID
        if not is_duplicate or failure.details["writeConcernErrors"]:
            raise _without_documents(failure)
        if not batch.ignore_duplicates or place.in_transaction:
            raise duplicate(batch._replace(events=[added[refused["index"]][0]]))
        # Written by somebody else since we looked. The rest follows in its order.
        added = added[refused["index"] + 1 :]


def _other_shards(place: _Place) -> SchemaError:
    _shards_of.get(place.client, {}).pop((place.database, place.names.prefix), None)
    return SchemaError(
        f"the outbox '{place.names.prefix}' was made anew with another number of shards; "
        "run the transaction again: the number is read again"
    )


def _without_documents(error: BulkWriteError) -> BulkWriteError:
    """The same error, which still tells with_transaction what to do, without the payloads."""
    failures = [{name: each.get(name) for name in ("index", "code", "errmsg")} for each in error.details["writeErrors"]]
    labels = [label for label in _LABELS if error.has_error_label(label)]
    return BulkWriteError({**error.details, "writeErrors": failures, "errorLabels": labels})


def _exists(place: _Place, asked: Question) -> _Steps[bool]:
    yield from _shards(place)
    for name in ("event", "dead_letter"):
        found = yield place.collection(name).find_one({"_id": asked.id}, {"_id": True}, session=place.session)
        if found is not None:
            return True
    return False
