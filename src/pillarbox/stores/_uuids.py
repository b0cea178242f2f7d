"""Ids from their bytes."""

from typing import Final
from uuid import UUID

_UNKNOWN: Final = UUID(int=0).is_safe


def uuid_of(value: bytes) -> UUID:
    """Past the constructor, which checks what 16 bytes of a database cannot get wrong."""
    made = object.__new__(UUID)
    object.__setattr__(made, "int", int.from_bytes(value))
    object.__setattr__(made, "is_safe", _UNKNOWN)
    return made
