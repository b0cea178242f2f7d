"""A store on MongoDB from a handle of the application."""

from typing import Any

from pymongo.asynchronous.database import AsyncDatabase

from pillarbox.stores.mongo import MongoStore


def store_of_handle(handle: Any, **options: Any) -> MongoStore:
    """A store on the application's ``pymongo.AsyncMongoClient``, or on a database of it."""
    if isinstance(handle, AsyncDatabase):
        return MongoStore.of(handle.client, handle.name, **options)
    return MongoStore.of(handle, **options)
