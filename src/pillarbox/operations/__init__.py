"""The work of an operator, as functions that return data: the command line prints it.

Each function takes the contract that it needs: ``Insights`` to look, ``Desk`` to look and to act.
"""

from pillarbox.operations.consumers import ConsumerRow, consumer_status
from pillarbox.operations.dead_letters import Decided, count_dead, discard, find_all_dead, replay
from pillarbox.operations.desk import Desk, NotFound, SeveralStreams
from pillarbox.operations.doctor import examine_store
from pillarbox.operations.events import find_dead_letter, find_event, published, replay_published
from pillarbox.operations.filters import filter_from, instant
from pillarbox.operations.records import audit_record, consumer_record, event_record, list_record, stream_record
from pillarbox.operations.streams import PlannedStream, Steered, StreamRow, pause, resume, status
from pillarbox.operations.why import Why, why

__all__ = [
    "ConsumerRow",
    "Decided",
    "Desk",
    "NotFound",
    "PlannedStream",
    "SeveralStreams",
    "Steered",
    "StreamRow",
    "Why",
    "audit_record",
    "consumer_record",
    "consumer_status",
    "count_dead",
    "discard",
    "event_record",
    "examine_store",
    "filter_from",
    "find_all_dead",
    "find_dead_letter",
    "find_event",
    "instant",
    "list_record",
    "pause",
    "published",
    "replay",
    "replay_published",
    "resume",
    "status",
    "stream_record",
    "why",
]
