"""The relay: takes events from a store and hands them to publishers, at least once and in order per key."""

from pillarbox.relay.retry import Exponential, Fixed, Linear
from pillarbox.relay.stream import OnDead, Stream
from pillarbox.relay.supervisor import Relay

__all__ = ["Exponential", "Fixed", "Linear", "OnDead", "Relay", "Stream"]
