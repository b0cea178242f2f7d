"""Rows: a consumer's transaction with an inbox and one effect, against the same statements by hand."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from benchmarks.bed import Bed, say
from benchmarks.inbox_by_hand import BATCH, PREFIX, Hand, hand_of
from benchmarks.pairs import Work, in_transaction, medians, speeds, url_of, without_commit
from benchmarks.report import Row
from benchmarks.scale import Scale
from pillarbox import Event, Inbox
from pillarbox.conformance.driver_setup import Application
from pillarbox.conformance.events import make_event
from pillarbox.urls import store_from_url
from tests.drivers import applications

_AGGREGATES = 100
_numbers = count(1)

DRIVERS: Mapping[str, tuple[str, type[Application]]] = {
    "psycopg": ("postgres", applications.Psycopg),
    "asyncpg": ("postgres", applications.Asyncpg),
    "sqlalchemy-session": ("postgres", applications.SqlAlchemySession),
    "pymysql": ("mysql", applications.PyMysql),
    "asyncmy": ("mysql", applications.AsyncMy),
    "sqlite3": ("sqlite", applications.Sqlite3),
    "pymongo": ("mongo", applications.PyMongo),
}
_FEW = ("psycopg", "asyncpg", "pymysql", "sqlite3", "pymongo")


class Kind(NamedTuple):
    """What is done in a transaction. sides: makes the two sides, ours first."""

    unit: str
    drivers: Sequence[str]
    turns: int
    events: int  # of a transaction
    sides: Callable[[Application, Hand], tuple[Work, Work]]


def _one(verb: str) -> Callable[[Application, Hand], tuple[Work, Work]]:
    def sides(driver: Application, hand: Hand) -> tuple[Work, Work]:
        ask, by_hand = getattr(Inbox("by-inbox", prefix=PREFIX), verb), getattr(hand, verb)

        async def ours(events: Sequence[Event]) -> None:
            answer = ask(driver.handle, events[0])
            if (await answer) if driver.is_awaited else answer:
                await hand.apply(events)

        async def floor(events: Sequence[Event]) -> None:
            if await by_hand(events[0]):
                await hand.apply(events)

        return ours, floor

    return sides


def _batch(driver: Application, hand: Hand) -> tuple[Work, Work]:
    inbox = Inbox("by-inbox", prefix=PREFIX)

    async def ours(events: Sequence[Event]) -> None:
        answer = inbox.record_all(driver.handle, events)
        await hand.apply((await answer) if driver.is_awaited else answer)

    async def floor(events: Sequence[Event]) -> None:
        await hand.apply(await hand.record_all(events))

    return ours, floor


KINDS: Mapping[str, Kind] = {
    "record": Kind("transactions/s", [*DRIVERS], 200, 1, _one("record")),
    "batch": Kind("events/s", _FEW, 50, BATCH, _batch),
    "newer": Kind("transactions/s", _FEW, 200, 1, _one("newer")),
}


def _event() -> Event:
    number = next(_numbers)
    aggregate = str(number % _AGGREGATES)
    return make_event(key=aggregate, aggregate_type="order", aggregate_id=aggregate, aggregate_version=number)


async def measure(name: str, driver_name: str, url: str, rounds: int, turns: int) -> Row:
    """One row. Every event is new, so a side that skips one has no figure."""
    kind, driver = KINDS[name], DRIVERS[driver_name][1](url)
    store = store_from_url(url, prefix=PREFIX)
    await store.migrate()
    await store.close()
    await driver.open()
    hand = hand_of(driver)
    await hand.prepare()
    sides = kind.sides(driver, hand)
    whole = [in_transaction(driver, side) for side in sides]

    def give() -> Any:
        return [_event() for _ in range(kind.events)]

    await medians(turns, give, *whole)
    found = [await medians(turns, give, *whole) for _ in range(rounds)]
    effects, wanted = await hand.effects(), len(sides) * (1 + rounds) * turns * kind.events
    if effects != wanted:
        raise AssertionError(f"{effects} of {wanted} events were applied")
    extra = await without_commit(driver, turns, give, *sides)
    await hand.drop()
    await driver.close()
    return Row(f"inbox-{name}-{driver_name}", kind.unit, *speeds(found, kind.events), extra=extra)


def rows(name: str) -> Callable[[Bed, Scale], list[Row]]:
    """One row for each driver."""

    def measured(bed: Bed, scale: Scale) -> list[Row]:
        found = []
        for driver_name in KINDS[name].drivers:
            url = url_of(bed, DRIVERS[driver_name][0])
            found.append(asyncio.run(measure(name, driver_name, url, scale.rounds, KINDS[name].turns)))
            say(f"  {found[-1].name}: ratio {found[-1].as_dict()['ratio']}")
        return found

    return measured
