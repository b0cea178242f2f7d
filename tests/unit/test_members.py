"""The workers of a stream, from what a store has noted of them."""

from datetime import UTC, datetime, timedelta

from pillarbox.store import WorkerStatus
from pillarbox.stores._members import members

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_a_worker_is_live_until_it_misses_a_renewal() -> None:
    """With a lease of 15 s it renews every 5 s."""
    workers = [
        ("mail", "ann", at(-6), at(9), None, None, "1.2"),
        ("mail", "bob", at(-8), at(7), "refused", at(-60), None),
    ]
    owners = [("mail", "ann", 8, at(9)), ("mail", "bob", 8, at(7.5))]
    assert members(NOW, workers, owners) == {
        "mail": [
            WorkerStatus("ann", True, 6.0, 8, 9.0, version="1.2"),
            WorkerStatus("bob", False, 8.0, 8, 7.5, "refused", 60.0),
        ]
    }


def test_a_worker_that_left_is_named_while_it_owns_shards() -> None:
    owners = [("mail", "ann", 1, at(3)), ("mail", "bob", 2, at(-1)), ("jobs", "cleo", 3, at(1))]
    assert members(NOW, [], owners) == {
        "mail": [WorkerStatus("ann", False, None, 1, 3.0)],
        "jobs": [WorkerStatus("cleo", False, None, 3, 1.0)],
    }


def test_a_worker_that_is_gone_is_not_named() -> None:
    assert members(NOW, [("mail", "ann", at(-20), at(-5), None, None, None)], [("mail", "ann", 1, at(-5))]) == {}
