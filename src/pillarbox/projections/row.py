"""The row that an upsert writes, for the statements of all databases."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from pillarbox.errors import ConfigError
from pillarbox.event import Event

_LARGEST: Final = 2**63 - 1


class Version(NamedTuple):
    """The version of a row. Events that were written in one flush share a number; their ids grow."""

    number: int
    id: UUID | None = None  # None: the number alone decides

    @classmethod
    def of(cls, version: Any) -> "Version":
        if isinstance(version, Event):
            if version.aggregate_version is None:
                raise ConfigError(
                    f"event {version.id} has no aggregate_version; give one where the event is added, "
                    "or pass a number as version"
                )
            return cls(version.aggregate_version, version.id)
        if isinstance(version, bool) or not isinstance(version, int) or not -_LARGEST <= version <= _LARGEST:
            raise ConfigError("version is no whole number of 64 bits; pass such a number, or the event")
        return cls(version)


class Row(NamedTuple):
    """``key`` and ``values`` map columns to cells. ``version``: only an older row is overwritten; None: any row is."""

    table: Any  # names are checked by each database's own rules
    key: Mapping[Any, Any]
    values: Mapping[Any, Any]
    version: Version | None
    version_column: str
    id_column: str

    @property
    def guard(self) -> dict[Any, Any]:
        """The columns of the version."""
        if self.version is None:
            return {}
        number, event_id = self.version
        return {self.version_column: number} | ({} if event_id is None else {self.id_column: event_id})

    def check(self) -> None:
        if not self.key:
            raise ConfigError("key is empty; pass the columns that identify a row, with their values")
        for column, value in self.key.items():
            if value is None:
                raise ConfigError(f"key column {column!r} is None, which equals no other value; pass another key")
        if not self.values and self.version is None:
            raise ConfigError("values is empty and there is no version, so nothing would be written; pass values")
        columns = [*self.key, *self.values, *self.guard]
        twice = next((column for column in columns if columns.count(column) > 1), None)
        if twice is not None:
            raise ConfigError(f"column {twice!r} would be written twice; name it once in key, values or version")
