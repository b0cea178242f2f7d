"""The tokens of leases."""

import secrets


def new_token() -> int:
    """A random number that a bigint column can hold, also with the number of a shard added to it.

    Not a counter: a standby that was promoted without the last commits would count the same numbers again, and a worker
    with such a token would pass for the owner."""
    return secrets.randbits(62)
