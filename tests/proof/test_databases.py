"""The log of changes: a row that is replaced, so that its event enters at the end, is no change of the event."""

from dataclasses import replace

import pytest

from proof.databases.sql import _without_re_entries
from proof.history import Change

INSERT = Change(0, 0.0, "event", "orders", event_id="e1", new="pending")
DELETE = replace(INSERT, old="pending", new=None)
DIES = Change(0, 0.0, "dead", "orders", event_id="e1", new="dead")
REPLAYED = [replace(DIES, old="dead", new=None), Change(0, 0.0, "audit", "orders", event_id="e1", new="replay")]
PUBLISH = replace(INSERT, old="pending", new="published")
PRUNE = replace(INSERT, old="published", new=None)
OTHER = replace(INSERT, event_id="e2")


@pytest.mark.parametrize(
    ("logged", "left_out"),
    [
        ([INSERT, PUBLISH, PRUNE], set()),
        ([INSERT, DELETE], set()),
        ([INSERT, DIES, DELETE, INSERT, *REPLAYED], set()),
        # MySQL replaces by a delete and an insert, SQLite logs the insert only.
        ([INSERT, DELETE, OTHER, INSERT, PUBLISH], {1, 3}),
        ([INSERT, OTHER, INSERT, PUBLISH], {2}),
        ([INSERT, DIES, DELETE, INSERT, DELETE, INSERT, *REPLAYED, PUBLISH], {4, 5}),
        ([INSERT, DIES, DELETE, INSERT, INSERT, *REPLAYED, PUBLISH], {4}),
        ([INSERT, DIES, DELETE, INSERT, INSERT, *REPLAYED, DIES, DELETE, INSERT, INSERT, *REPLAYED], {4, 10}),
    ],
)
def test_re_entries_are_left_out(logged: list[Change], left_out: set[int]) -> None:
    changes = [replace(change, seq=place) for place, change in enumerate(logged)]

    found = {change.seq for change in _without_re_entries(changes)}

    assert found == set(range(len(changes))) - left_out
