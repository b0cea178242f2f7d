"""Rows: what our hooks cost a SQLAlchemy session that writes no event."""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

from sqlalchemy import Engine, StaticPool, create_engine, event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, SessionEvents, mapped_column

from benchmarks.bed import Bed, say
from benchmarks.pairs import speeds
from benchmarks.report import Row
from benchmarks.rounds import in_turn
from benchmarks.scale import Scale
from pillarbox.drivers.registry import prepare

BLOCKS = 20
_TRANSACTIONS = 25  # of a block


class _Base(DeclarativeBase):
    """Of the table below."""


class _Order(_Base):
    __tablename__ = "session_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int]


class Hook(NamedTuple):
    """A function that is called for an event of every session."""

    name: str
    function: Any


def hooks() -> list[Hook]:
    """Ours, on all sessions."""
    prepare()
    ours = [module for name, module in sys.modules.items() if name.startswith("pillarbox.")]
    # In the order in which they were set, because they are set again.
    functions = dict.fromkeys(each for module in ours for each in vars(module).values() if type(each) is FunctionType)
    names = [name for name in vars(SessionEvents) if not name.startswith("_") and name != "dispatch"]
    return [Hook(name, each) for name in names for each in functions if event.contains(Session, name, each)]


@contextmanager
def without(given: Sequence[Hook]) -> Iterator[None]:
    """Take hooks off, and set them again."""
    for name, function in given:
        event.remove(Session, name, function)
    try:
        yield
    finally:
        for name, function in given:
            event.listen(Session, name, function)


def _block(engine: Engine) -> float:
    """Microseconds of a transaction that adds one row: the median of a block."""
    taken = []
    for _ in range(_TRANSACTIONS):
        begun = time.perf_counter()
        with Session(engine) as session:
            session.add(_Order(customer="c-17", amount=7))
            session.commit()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e6


def measure(database: str, engine: Engine, rounds: int, blocks: int = BLOCKS) -> Row:
    """One row: blocks of transactions with the hooks and without them, in turn."""
    ours = hooks()

    def bare() -> float:
        with without(ours):
            return _block(engine)

    _Base.metadata.create_all(engine)
    found = []
    for _ in range(1 + rounds):
        sides = in_turn(blocks, lambda: _block(engine), bare)
        found.append([statistics.median(side) for side in sides])
    _Base.metadata.drop_all(engine)
    engine.dispose()
    return Row(f"session-without-aggregates-{database}", "transactions/s", *speeds(found[1:]))


def sessions(bed: Bed, scale: Scale) -> list[Row]:
    """In SQLite's memory, where the hooks weigh most, and on PostgreSQL."""
    postgres = create_engine(bed.url.replace("postgresql:", "postgresql+psycopg:", 1))
    engines = {"memory": create_engine("sqlite://", poolclass=StaticPool), "postgres": postgres}
    rows = []
    for database, engine in engines.items():
        rows.append(measure(database, engine, scale.rounds))
        say(f"  {rows[-1].name}: ratio {rows[-1].as_dict()['ratio']}")
    return rows
