"""The ticket of a batch: what a destination keeps so that a store knows after a crash what was published. Pure.

A ticket names a batch and its events, and the batch that the shard settled before. It names events by their ids: a
place or a snapshot can name other events after a database has failed over to a standby that lagged behind.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Self
from uuid import UUID, uuid4

from pillarbox.errors import ProgressError
from pillarbox.event import Event
from pillarbox.store.records import Grant

_VERSION: Final = 1
_NO_BATCH: Final = UUID(int=0)


class Ticket(NamedTuple):
    """A batch that was published together. before: the batch that its shard had settled last; None: there was none."""

    batch: UUID
    before: UUID | None
    ids: Sequence[UUID]

    @classmethod
    def read(cls, data: bytes) -> Self:
        if not data or data[0] != _VERSION or len(data) < 33 or len(data) % 16 != 1:
            raise ProgressError(
                "the destination's note of what was published last cannot be read; "
                "if a newer release wrote it, start that release, and else see the runbook: Exactly once into Kafka"
            )
        batch, before, *ids = (UUID(bytes=data[start : start + 16]) for start in range(1, len(data), 16))
        return cls(batch, None if before == _NO_BATCH else before, ids)


def new_ticket(events: Sequence[Event], before: UUID | None) -> bytes:
    """The ticket of a new batch. before: what the shard's last ``Progress`` says."""
    return b"".join(
        (bytes((_VERSION,)), uuid4().bytes, (before or _NO_BATCH).bytes, *(event.id.bytes for event in events))
    )


def batch_of(ticket: bytes) -> UUID:
    """The batch that a ticket names."""
    return UUID(bytes=ticket[1:17])


def unsettled(data: bytes, settled: UUID | None, grant: Grant) -> Ticket | None:
    """The ticket, if its batch is the next one to settle; None: there is nothing to settle.

    data: the last ticket that the destination has; empty: it has none. settled: the shard's last settled batch. Raises
    ProgressError if the two do not fit, because one of them is older than the other knows.
    """
    place = f"shard {grant.shard} of stream '{grant.stream}'"
    if not data:
        if settled is None:
            return None
        raise ProgressError(
            f"{place} has settled batches, and its destination knows of none: the progress topic was deleted, or the "
            f"outbox was served under another identity; {_REMEDY}"
        )
    ticket = Ticket.read(data)
    if ticket.batch == settled:
        return None
    if ticket.before != settled:
        raise ProgressError(
            f"{place}: the destination and the database do not agree on what was published last; the database was "
            f"restored or copied, or has lost commits, or the progress topic has; {_REMEDY}"
        )
    return ticket


_REMEDY: Final = (
    "nothing is published, because copies would be; see the runbook, and to go on with copies run: "
    "pillarbox identity --new"
)
