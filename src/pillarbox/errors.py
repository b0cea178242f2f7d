"""All errors. A message says what happened and what to do; it never contains a payload or a secret."""


class PillarboxError(Exception):
    """The root: catch it to catch everything that Pillarbox raises."""


class InvalidEvent(PillarboxError, ValueError):
    """An event that could not be delivered, refused where it was written."""


class NotInTransaction(PillarboxError):
    """The handle has no open transaction: the event and the data could not commit together."""


class DuplicateEvent(PillarboxError):
    """An event with this id is in the outbox already."""


class StaleAggregate(PillarboxError):
    """Another transaction has changed or deleted the aggregate since it was loaded; nothing of this one is written."""


class ConfigError(PillarboxError, ValueError):
    """A setting is wrong: names itself, its value and the remedy."""


class MissingExtra(ConfigError):
    """An optional dependency is not installed."""

    def __init__(self, wanted_by: str, extra: str) -> None:
        super().__init__(f"{wanted_by} needs an extra; install it with: pip install 'pillarbox[{extra}]'")


class StoreError(PillarboxError):
    """The database refused, and trying again will not help until someone acts."""


class NotAllowed(StoreError):
    """The database does not allow this user what was asked."""


class StoreDown(PillarboxError):
    """The database cannot be reached now; the relay tries again by itself."""


class SchemaError(StoreError):
    """The tables are missing, or of a version that this release does not know."""


class OldSchema(SchemaError):
    """The tables are those of an earlier release: migrate them."""


class ProgressError(StoreError):
    """The database and the destination do not agree on what was published: one is older than the other knows."""


class NotDrained(PillarboxError):
    """A drain cannot end: events wait for something that only an operator can change."""


class LeaseLost(PillarboxError):
    """The token is stale: another worker owns this shard or event now, and nothing was changed."""


class Outage(PillarboxError):
    """The destination, or a service that a handler needs, is away: the circuit opens and no event is charged.

    Publishers raise it, and so may handlers: it says that no event is to blame."""


class CheckFailed(PillarboxError):
    """A check of the reconciler raised, or found what cannot be emitted."""


class Reject(PillarboxError):
    """Raised by a handler for an event that can never succeed: it dies at once, without another attempt."""
