"""A transactional outbox: events written with your data, published at least once and in order per key."""

from pillarbox.errors import InvalidEvent, Outage, PillarboxError, Reject
from pillarbox.event import Event, Mode, Status
from pillarbox.ids import stable_id
from pillarbox.maintenance.check import Check
from pillarbox.outbox import Outbox
from pillarbox.projections import upsert
from pillarbox.publishers.handlers import Handlers
from pillarbox.relay import Exponential, Fixed, Linear, OnDead, Relay, Stream

__version__ = "0.1.0.dev0"

__all__ = [
    "Check",
    "Event",
    "Exponential",
    "Fixed",
    "Handlers",
    "InvalidEvent",
    "Linear",
    "Mode",
    "OnDead",
    "Outage",
    "Outbox",
    "PillarboxError",
    "Reject",
    "Relay",
    "Status",
    "Stream",
    "stable_id",
    "upsert",
]
