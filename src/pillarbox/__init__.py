"""A transactional outbox: events written with your data, published at least once and in order per key."""

from pillarbox.aggregates import Aggregate, UnitOfWork, check_saved, current_tenant
from pillarbox.asgi import lifespan
from pillarbox.consumer import Consumer
from pillarbox.errors import InvalidEvent, Outage, PillarboxError, Reject, StaleAggregate
from pillarbox.event import Event, Mode, Status
from pillarbox.idempotency import Idempotency
from pillarbox.ids import stable_id
from pillarbox.inbox import Inbox
from pillarbox.maintenance.check import Check
from pillarbox.outbox import EventSink, Outbox
from pillarbox.projections import upsert
from pillarbox.publishers.handlers import Handlers
from pillarbox.relay import Exponential, Fixed, Linear, OnDead, Relay, Schedule, Stream
from pillarbox.version import __version__

__all__ = [
    "Aggregate",
    "Check",
    "Consumer",
    "Event",
    "EventSink",
    "Exponential",
    "Fixed",
    "Handlers",
    "Idempotency",
    "Inbox",
    "InvalidEvent",
    "Linear",
    "Mode",
    "OnDead",
    "Outage",
    "Outbox",
    "PillarboxError",
    "Reject",
    "Relay",
    "Schedule",
    "StaleAggregate",
    "Status",
    "Stream",
    "UnitOfWork",
    "__version__",
    "check_saved",
    "current_tenant",
    "lifespan",
    "stable_id",
    "upsert",
]
