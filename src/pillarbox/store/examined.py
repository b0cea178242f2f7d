"""The contract of a store that tells whether its server is fit for an outbox."""

from collections.abc import Sequence
from typing import Protocol

from pillarbox.finding import Finding


class Examined(Protocol):
    """Checks of a database server. They change nothing."""

    async def examine(self, lease_seconds: float) -> Sequence[Finding]:
        """Rights of this user, durability, time limits and connections of the server, old transactions.

        lease_seconds: the longest lease of the relays; a time limit below it is a finding."""
        ...
