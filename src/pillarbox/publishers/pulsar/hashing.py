"""The partition of a key, as Pulsar's Java client chooses it. Pure.

All clients of a topic have to agree: a key on two partitions has no order.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

_32_BITS: Final = 0xFFFF_FFFF


@lru_cache(maxsize=16_384)
def java_hash(key: str) -> int:
    """Java's ``String.hashCode``, over the UTF-16 code units, without its sign."""
    number = 0
    for unit in memoryview(key.encode("utf-16-le")).cast("H"):
        number = (31 * number + unit) & _32_BITS
    return number & 0x7FFF_FFFF


@lru_cache(maxsize=16_384)
def murmur3_hash(key: str) -> int:
    """Murmur3 of the UTF-8 bytes with 32 bits and seed 0, without its sign."""
    data = key.encode()
    number, whole = 0, len(data) & ~3
    for start in range(0, whole, 4):
        number = _rotated(number ^ _mixed(int.from_bytes(data[start : start + 4], "little")), 13)
        number = (number * 5 + 0xE654_6B64) & _32_BITS
    if whole < len(data):
        number ^= _mixed(int.from_bytes(data[whole:], "little"))
    number ^= len(data)
    for shift, factor in ((16, 0x85EB_CA6B), (13, 0xC2B2_AE35)):
        number = ((number ^ (number >> shift)) * factor) & _32_BITS
    return (number ^ (number >> 16)) & 0x7FFF_FFFF


def _mixed(block: int) -> int:
    return (_rotated((block * 0xCC9E_2D51) & _32_BITS, 15) * 0x1B87_3593) & _32_BITS


def _rotated(number: int, bits: int) -> int:
    return ((number << bits) | (number >> (32 - bits))) & _32_BITS


HASHES: Final[Mapping[str, Callable[[str], int]]] = MappingProxyType({"java": java_hash, "murmur3": murmur3_hash})
