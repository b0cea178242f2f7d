"""The outbox that applications use: it makes events and writes them in the caller's transaction."""

from pillarbox.outbox.fields import EventFields, OnDuplicate
from pillarbox.outbox.outbox import Outbox
from pillarbox.outbox.sink import EventSink
from pillarbox.outbox.transaction import Transaction

__all__ = ["EventFields", "EventSink", "OnDuplicate", "Outbox", "Transaction"]
