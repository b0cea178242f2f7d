"""The contract of an operator: pause and resume streams, decide about dead letters."""

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
        for it."""
        ...

    async def discard(self, refs: Sequence[Ref], by: str) -> int:
        """Give up dead letters for good; returns their number. A key that they blocked goes on."""
        ...
