"""What every store knows of its outbox, whichever database it is in: where it is, its shards and its version."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from pillarbox.errors import ConfigError, LeaseLost, OldSchema, SchemaError
from pillarbox.names import Names
from pillarbox.store import Grant


class Step(Protocol):
    """What brings an outbox to a version."""

    @property
    def number(self) -> int: ...

    @property
    def name(self) -> str: ...


class Openable(Protocol):
    async def open(self) -> None:
        """Safe to call twice."""

    async def close(self) -> None: ...


def lost(grant: Grant) -> LeaseLost:
    return LeaseLost(f"worker {grant.worker} no longer owns shard {grant.shard} of stream '{grant.stream}'")


class OutboxPart:
    """The part of a store that opens and closes it, and judges the version of its schema."""

    made_of: ClassVar[str]  # what a database calls that which holds the events
    _db: Openable

    def __init__(self, names: Names, *, shards: int, description: str) -> None:
        if not 1 <= shards <= 1024:
            raise ConfigError(f"shards {shards} is out of range; use 1 to 1024 (16 serves most)")
        self._names = names
        self._shards = shards  # of a new outbox; one that exists brings its own
        self._description = description
        self._opened = 0

    @property
    def description(self) -> str:
        """Where the outbox is, without secrets."""
        return self._description

    @property
    def shards(self) -> int:
        return self._shards

    async def open(self, on_wake: Callable[[str], None] | None = None) -> None:
        """Safe to call several times: relays of one process can share a store. Each call needs a close."""
        await self._db.open()
        try:
            self._judge(await self._version())
        except BaseException:
            if not self._opened:
                await self._db.close()
            raise
        self._opened += 1

    async def close(self) -> None:
        self._opened = max(0, self._opened - 1)
        if not self._opened:
            await self._db.close()

    def steps(self) -> Sequence[Step]:
        """Every step of a migration, in order."""
        raise NotImplementedError

    async def _version(self) -> int:
        """The version of what is there, 0 if there is nothing; its number of shards becomes this store's."""
        raise NotImplementedError

    def _judge(self, version: int) -> None:
        where, newest = self._where(), self.steps()[-1].number
        if version <= 0:
            raise SchemaError(
                f"{where} has no {self.made_of} yet; make them with `pillarbox init`, or `await store.migrate()`"
            )
        self._refuse_a_newer(version)
        if version < newest:
            raise OldSchema(
                f"{where} has schema version {version}, not yet {newest}; "
                "run `pillarbox migrate`, or `await store.migrate()`"
            )

    def _refuse_a_newer(self, version: int) -> None:
        if version > (newest := self.steps()[-1].number):
            raise SchemaError(
                f"{self._where()} has schema version {version}, this release knows only {newest}; "
                "install a newer pillarbox"
            )

    def _where(self) -> str:
        return f"the outbox '{self._names.prefix}' in {self.description}"
