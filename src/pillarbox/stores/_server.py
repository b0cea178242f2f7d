"""Findings that servers have in common."""

from typing import Final

from pillarbox.finding import Finding, ok, warning

_OLD_SECONDS: Final = 300.0
_SPARE: Final = 10  # connections for others


def old_transaction(seconds: float | None, what: str) -> Finding:
    if seconds is None or seconds < _OLD_SECONDS:
        return ok("old_transactions", "no transaction is older than 5 minutes")
    return warning(
        "old_transactions",
        f"{what} is open for {seconds / 60:.0f} minutes; while it is, the server keeps what was deleted, and reads "
        "slow down",
        "end it, and give jobs like it a time limit",
    )


def time_limit(name: str, seconds: float, lease_seconds: float) -> Finding:
    """A limit that ends sessions or statements of a relay; 0: none."""
    if not 0 < seconds < lease_seconds:
        return ok(name, f"{name} is {f'{seconds:g} s' if seconds else 'off'}")
    return warning(
        name,
        f"{name} is {seconds:g} s, less than a lease of {lease_seconds:g} s: the server may end the relay's work",
        f"raise {name} for the user of the relay",
    )


def connections(limit: int, used: int, pool: int) -> Finding:
    said = f"the server takes {limit} connections, {used} are open, a relay opens up to {pool}"
    if used + pool + _SPARE <= limit:
        return ok("connections", said)
    return warning("connections", said, "raise the server's limit, or lower pool_size")
