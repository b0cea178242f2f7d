"""The contracts between Pillarbox and a database, one for each caller; a store is their sum.

A contract defines meaning, never SQL. All instants are compared by the database's clock; durations are seconds. Every
change of an event carries its token. A stale token changes nothing: the result leaves its item out, or a method that
takes only one item raises LeaseLost. A database that cannot be reached raises StoreDown.
"""

from pillarbox.store.consumers import ConsumerReport, Consumers, ConsumerStatus, Replay
from pillarbox.store.examined import Examined
from pillarbox.store.gauges import Ahead, Gauges, StreamGauges, StuckKey, WorkerStatus
from pillarbox.store.insights import Insights
from pillarbox.store.operator import Operator
from pillarbox.store.ordered import Ordered, Turns
from pillarbox.store.queue import Claims, Queue
from pillarbox.store.records import (
    CRASHES_ALONE,
    PARKED,
    Audit,
    Claim,
    ClaimResults,
    DeadLetter,
    Failure,
    Features,
    Filter,
    Found,
    Grant,
    Hold,
    HoldMode,
    KeyRun,
    Page,
    Progress,
    Ref,
    Rescued,
    Settlement,
    Work,
)
from pillarbox.store.retention import Retention
from pillarbox.store.schema import Schema
from pillarbox.store.serving import Serving
from pillarbox.store.store import Store
from pillarbox.store.ticket import batch_of, new_ticket
from pillarbox.store.writing import Writing

__all__ = [
    "CRASHES_ALONE",
    "PARKED",
    "Ahead",
    "Audit",
    "Claim",
    "ClaimResults",
    "Claims",
    "ConsumerReport",
    "ConsumerStatus",
    "Consumers",
    "DeadLetter",
    "Examined",
    "Failure",
    "Features",
    "Filter",
    "Found",
    "Gauges",
    "Grant",
    "Hold",
    "HoldMode",
    "Insights",
    "KeyRun",
    "Operator",
    "Ordered",
    "Page",
    "Progress",
    "Queue",
    "Ref",
    "Replay",
    "Rescued",
    "Retention",
    "Schema",
    "Serving",
    "Settlement",
    "Store",
    "StreamGauges",
    "StuckKey",
    "Turns",
    "Work",
    "WorkerStatus",
    "Writing",
    "batch_of",
    "new_ticket",
]
