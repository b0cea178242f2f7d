"""The contract of an operator: pause and resume streams, replay events, decide about dead letters."""

from collections.abc import Sequence
from typing import Protocol

from pillarbox.store.records import Ref


class Operator(Protocol):
    """Changes by an operator. Each one writes an audit row that names ``by``."""

    async def pause(self, stream: str, by: str) -> None: ...

    async def resume(self, stream: str, by: str) -> None: ...

    async def replay(self, refs: Sequence[Ref], by: str) -> int:
        """Give dead letters another run of attempts; returns their number. They enter at the end of their stream, in
        their old order. If its key is held, a dead letter returns to its old place, because the events behind it wait
        for it.

        A consumer's dead letter stays until the consumer has applied it: in one transaction it gets an instant for its
        replay, and its event does not count as applied any more."""
        ...

    async def replay_published(self, refs: Sequence[Ref], by: str) -> int:
        """Publish published events again, uncharged; returns their number. Others are left alone.

        They enter at the end of their stream, in their old order, and wait from now on. If its key is held, an event
        returns to its old place, and is published with the events of its key. All of them are one transaction."""
        ...

    async def discard(self, refs: Sequence[Ref], by: str) -> int:
        """Give up dead letters for good; returns their number. A key that they blocked goes on. The event of a
        consumer's dead letter keeps counting as applied, so that no copy of it is applied later."""
        ...
