"""The proof of the demo: compares the committed orders with the delivered events."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple


class Delivery(NamedTuple):
    """One row of the ledger, which is in the order of the deliveries."""

    event_id: str
    key: str
    number: int  # the place of the order within its key, from 1


class Proof(NamedTuple):
    """The comparison at the end, when nothing is in flight."""

    committed: int
    rolled_back: int
    delivered: int
    lost: int
    phantom: int  # delivered, though never committed
    keys: int
    keys_out_of_order: int
    copies: int
    slots: int  # of the killed worker: turns at once
    batch: int  # of the killed worker: the most that one turn reads

    @property
    def copies_limit(self) -> int:
        """The most events that the killed worker can have delivered and not settled: a batch on each slot."""
        return self.slots * self.batch

    @property
    def holds(self) -> bool:
        return self.committed > 0 and all(line.holds for line in self.lines())

    def lines(self) -> list["Line"]:
        """The proof in sentences, each with its verdict."""
        return [
            Line("committed", self.committed, "", self.committed > 0),
            Line("delivered", self.delivered, f"lost {self.lost:,}", not self.lost),
            Line("rolled back", self.rolled_back, f"delivered without a commit {self.phantom:,}", not self.phantom),
            Line("keys", self.keys, f"out of order {self.keys_out_of_order:,}", not self.keys_out_of_order),
            Line(
                "copies",
                self.copies,
                f"at most {self.copies_limit:,}: the killed worker had {self.slots} slots of {self.batch} events",
                self.copies <= self.copies_limit,
            ),
        ]

    def as_dict(self) -> dict[str, Any]:
        return {"holds": self.holds, **self._asdict(), "copies_limit": self.copies_limit}


class Line(NamedTuple):
    """One sentence of the proof."""

    name: str
    number: int
    remark: str
    holds: bool


def prove(
    placed: Collection[str], rolled_back: int, deliveries: Sequence[Delivery], *, slots: int, batch: int
) -> Proof:
    """Compare the committed event ids with the ledger. Only the first delivery of an event counts for the order."""
    committed, seen = set(placed), set[str]()
    last: dict[str, int] = {}
    disordered: set[str] = set()
    for event_id, key, number in deliveries:
        if event_id in seen:
            continue
        seen.add(event_id)
        # A rollback gives the number back, so the numbers of a key have no gap.
        if number != last.get(key, 0) + 1:
            disordered.add(key)
        last[key] = number
    return Proof(
        committed=len(committed),
        rolled_back=rolled_back,
        delivered=len(seen & committed),
        lost=len(committed - seen),
        phantom=len(seen - committed),
        keys=len(last),
        keys_out_of_order=len(disordered),
        copies=len(deliveries) - len(seen),
        slots=slots,
        batch=batch,
    )
