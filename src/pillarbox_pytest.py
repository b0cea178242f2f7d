"""The pytest plugin: fixtures that need no configuration. It is outside of the package, so that pytest starts quickly:
what a fixture needs is imported when a test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pillarbox import Event
    from pillarbox.stores.sqlite import SqliteStore
    from pillarbox.testing import MemoryPublisher, MemorySource, MemoryStore


@pytest.fixture
def outbox_events() -> Iterator[Sequence[Event]]:
    """The events that the test adds to any outbox, in order. They are written as usual."""
    from pillarbox.testing import capture

    with capture() as events:
        yield events


@pytest.fixture
def outbox_url(tmp_path: Path) -> str:
    """The URL of a new outbox in a SQLite file, with its tables; the file is in ``tmp_path``."""
    from pillarbox.stores.sqlite import SqliteStore

    path = tmp_path / "outbox.db"
    store = SqliteStore(str(path))
    _run(_migrate, store)
    _run(_close, store)
    return f"sqlite:///{path}"


@pytest.fixture
def outbox_store() -> Iterator[MemoryStore]:
    """A new outbox in memory, with its tables."""
    from pillarbox.testing import MemoryStore

    store = MemoryStore()
    _run(_migrate, store)
    yield store
    _run(_close, store)


@pytest.fixture
def outbox_publisher() -> MemoryPublisher:
    """A destination that keeps its deliveries, and fails on request."""
    from pillarbox.testing import MemoryPublisher

    return MemoryPublisher()


@pytest.fixture
def outbox_source() -> MemorySource:
    """A broker in memory for a consumer: ``outbox_source.topic.send(event)``."""
    from pillarbox.testing import MemorySource

    return MemorySource()


async def _migrate(store: SqliteStore) -> None:
    await store.migrate()


async def _close(store: SqliteStore) -> None:
    await store.close()


def _run(work: Callable[[SqliteStore], Coroutine[Any, Any, None]], store: SqliteStore) -> None:
    """In a thread and an event loop of its own, because the test may have one."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(work(store))).result()
