"""Ids from the forms in which databases store them."""

from typing import Final
from uuid import UUID

_UNKNOWN: Final = UUID(int=0).is_safe
# A UUID is immutable; its slots can be set once without the constructor.
_set_number: Final = UUID.__dict__["int"].__set__
_set_safety: Final = UUID.__dict__["is_safe"].__set__


def uuid_of(value: bytes) -> UUID:
    """From the 16 bytes that a database keeps."""
    return _made(int.from_bytes(value))


def uuid_of_text(value: str) -> UUID:
    """From the text that a database keeps."""
    return _made(int(value.replace("-", ""), 16))


def _made(number: int) -> UUID:
    """Without the constructor and its checks, which an id from a database does not need."""
    made = object.__new__(UUID)
    _set_number(made, number)
    _set_safety(made, _UNKNOWN)
    return made
