"""What the contract's tests must be able to do to an outbox on MongoDB."""

import itertools
import os

from pillarbox.conformance import Connect, StoreContract
from pillarbox.store import Features, Store
from pillarbox.stores.mongo import MongoStore

_numbers = itertools.count(1)


class MongoStoreContract(StoreContract):
    features = Features(wake_up=True)

    async def set_schema_version(self, store: Store, version: int) -> None:
        assert isinstance(store, MongoStore)
        await store._db.collection("meta").update_one({"_id": "schema"}, {"$set": {"version": version}})


def connect_to(url: str) -> Connect:
    """Stores on an outbox of their own in the database ``contract`` of that server."""
    prefix = f"contract_{os.getpid()}_{next(_numbers)}"
    own = url.replace("/?", "/contract?") if "/?" in url else f"{url}contract"
    return lambda *, shards=4: MongoStore(own, prefix=prefix, shards=shards)
