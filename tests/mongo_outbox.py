"""An outbox on MongoDB for tests: they make it and read its documents."""

import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import ASCENDING, MongoClient, WriteConcern
from pymongo.database import Database
from pymongo.monitoring import CommandListener, CommandStartedEvent

from pillarbox.mongo.schema import COLLECTIONS, collection
from pillarbox.names import Names
from pillarbox.stores.mongo import MongoStore

SHARDS = 16
_numbers = itertools.count(1)
_CODEC: CodecOptions[dict[str, Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD, tz_aware=True)


def database_url(url: str, database: str = "shop") -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{database}"))


class Calls(CommandListener):
    """Records the commands of a client."""

    def __init__(self) -> None:
        self.sent: list[CommandStartedEvent] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.sent.append(event)

    def succeeded(self, event: object) -> None:
        """Only commands are recorded."""

    failed = succeeded

    def named(self, name: str) -> list[Any]:
        return [event.command for event in self.sent if event.command_name == name]


class MongoOutbox:
    """An outbox in a database of the server."""

    def __init__(self, url: str, *, prefix: str | None = None, database: str = "shop") -> None:
        self.url = database_url(url, database)
        self.names = Names(prefix or f"shop_{os.getpid()}_{next(_numbers)}")
        self.client: MongoClient[dict[str, Any]] = MongoClient(self.url)
        self.database: Database[dict[str, Any]] = self.client.get_default_database(
            codec_options=_CODEC, write_concern=WriteConcern(w="majority")
        )
        self.make(SHARDS)

    @property
    def prefix(self) -> str:
        return self.names.prefix

    def make(self, shards: int) -> None:
        async def migrate() -> None:
            store = MongoStore(self.url, prefix=self.prefix, shards=shards)
            await store.migrate()
            await store.close()

        # In a thread: the test may have an event loop of its own.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, migrate()).result()

    def drop(self) -> None:
        for name in (*COLLECTIONS, "meta"):
            self[name].drop()

    def __getitem__(self, name: str) -> Any:
        return self.database[collection(self.names, name)]

    def events(self, **wanted: Any) -> Sequence[dict[str, Any]]:
        """The documents of the committed events, in order of seq."""
        return list(self["event"].find(wanted).sort("seq", ASCENDING))

    def types(self) -> list[str]:
        return [document["type"] for document in self.events()]

    def numbers(self) -> list[int]:
        """The ``n`` of their payloads."""
        return [json.loads(document["payload"])["n"] for document in self.events()]

    def close(self) -> None:
        self.client.close()
