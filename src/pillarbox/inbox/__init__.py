"""The inbox that consumers use: an event's effects happen once, however often it is delivered."""

from pillarbox.inbox.inbox import Inbox

__all__ = ["Inbox"]
