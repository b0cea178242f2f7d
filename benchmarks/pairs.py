"""Small pieces of work, ours and by hand, measured in turns in one process."""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from benchmarks.bed import Bed
from pillarbox.conformance.driver_setup import Application

Work: TypeAlias = Callable[[Any], Awaitable[object]]
"""Called with a value of its own each time."""


def nothing() -> None:
    """For work that needs no value."""


async def medians(turns: int, give: Callable[[], Any], *sides: Work) -> list[float]:
    """Microseconds of one call for each side: the median of many.

    The sides take turns, and every second turn swaps them. give: makes the value of a call, which takes no time of it.
    """
    taken: list[list[float]] = [[] for _ in sides]
    for turn in range(turns):
        places = range(len(sides))
        for place in places if turn % 2 == 0 else reversed(places):
            value, work = give(), sides[place]
            begun = time.perf_counter()
            await work(value)
            taken[place].append(time.perf_counter() - begun)
    return [statistics.median(side) * 1e6 for side in taken]


def speeds(rounds: Sequence[Sequence[float]], of_a_turn: int = 1) -> tuple[list[float], list[float]]:
    """The medians of each round as things done a second, of ours and of the other side."""
    ours, other = ([of_a_turn * 1e6 / taken for taken in side] for side in zip(*rounds, strict=True))
    return ours, other


def in_transaction(driver: Application, work: Work) -> Work:
    """The work between begin and commit."""

    async def whole(value: Any) -> None:
        await driver.begin()
        await work(value)
        await driver.commit()

    return whole


async def without_commit(driver: Application, turns: int, give: Callable[[], Any], *sides: Work) -> dict[str, float]:
    """The medians without begin and commit, which the disk does not disturb. Nothing is kept."""
    await driver.begin()
    ours, floor = await medians(turns, give, *sides)
    await driver.rollback()
    return {"ours_without_commit": ours, "floor_without_commit": floor}


def url_of(bed: Bed, database: str) -> str:
    """Where rows on this database work."""
    if database == "sqlite":
        return f"sqlite:///{bed.folder}/written.db"
    if database == "postgres":
        return bed.url
    return bed.mysql.url if database == "mysql" else bed.mongo.url
