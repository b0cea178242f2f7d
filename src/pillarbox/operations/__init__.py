"""The work of an operator, as functions that return data: the command line prints it.

Each function takes the contract that it needs: ``Insights`` to look, ``Desk`` to look and to act.
"""

from pillarbox.operations.dead_letters import Decided, count_dead, discard, find_all_dead, replay
from pillarbox.operations.desk import Desk, NotFound, SeveralStreams
from pillarbox.operations.events import find_dead_letter, find_event
from pillarbox.operations.filters import filter_from, instant
from pillarbox.operations.records import audit_record, event_record, list_record, stream_record
from pillarbox.operations.streams import PlannedStream, Steered, StreamRow, pause, resume, status

__all__ = [
    "Decided",
    "Desk",
    "NotFound",
    "PlannedStream",
    "SeveralStreams",
    "Steered",
    "StreamRow",
    "audit_record",
    "count_dead",
    "discard",
    "event_record",
    "filter_from",
    "find_all_dead",
    "find_dead_letter",
    "find_event",
    "instant",
    "list_record",
    "pause",
    "replay",
    "resume",
    "status",
    "stream_record",
]
