"""The facts about an outbox that all parts of a store share: its names, its shards, its version."""

from pillarbox.errors import ConfigError, LeaseLost, OldSchema, SchemaError
from pillarbox.names import Names
from pillarbox.store import Grant


class OutboxInfo:
    """Where an outbox is, and how many shards its streams have."""

    def __init__(self, names: Names, *, shards: int, description: str) -> None:
        if not 1 <= shards <= 1024:
            raise ConfigError(f"shards {shards} is out of range; use 1 to 1024 (16 serves most)")
        self.names = names
        self.shards = shards  # of a new outbox; one that exists has its own number, known once the store is open
        self.description = description

    def __str__(self) -> str:
        return f"the outbox '{self.names.prefix}' in {self.description}"


def lost(grant: Grant) -> LeaseLost:
    return LeaseLost(f"worker {grant.worker} no longer owns shard {grant.shard} of stream '{grant.stream}'")


def check_version(version: int, newest: int, outbox: str, made_of: str) -> None:
    """Refuse an outbox that this release cannot work with. ``made_of`` is what its database calls tables."""
    if version <= 0:
        raise SchemaError(f"{outbox} has no {made_of} yet; make them with `pillarbox init`, or `await store.migrate()`")
    refuse_newer(version, newest, outbox)
    if version < newest:
        raise OldSchema(
            f"{outbox} has schema version {version}, not yet {newest}; "
            "run `pillarbox migrate`, or `await store.migrate()`"
        )


def refuse_newer(version: int, newest: int, outbox: str) -> None:
    if version > newest:
        raise SchemaError(
            f"{outbox} has schema version {version}, this release knows only {newest}; install a newer pillarbox"
        )
