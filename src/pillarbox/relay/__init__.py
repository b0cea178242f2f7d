"""The relay: reads events from a store and gives them to publishers, at least once and in order per key."""

from pillarbox.relay.relay import Relay
from pillarbox.relay.retry import Exponential, Fixed, Linear, Schedule
from pillarbox.relay.stream import OnDead, Stream

__all__ = ["Exponential", "Fixed", "Linear", "OnDead", "Relay", "Schedule", "Stream"]
