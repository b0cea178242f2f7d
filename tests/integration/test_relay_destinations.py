"""Destinations that need no server, behind a whole relay."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from pillarbox.errors import Reject
from pillarbox.event import Event, Status
from pillarbox.publishers.handlers import Handlers
from pillarbox.store import Store
from pillarbox.stores.sql import SqlStore
from tests.integration.relays import (
    SqlOutbox,
    in_order,
    mixed,
    number,
    numbered,
    relay,
    settled,
    stream,
)

pytestmark = pytest.mark.asyncio


async def test_handlers_are_called_in_order_per_key(sql: SqlOutbox, store: Store) -> None:
    handlers = Handlers()
    seen: dict[str | None, list[int]] = {}
    threads: set[int] = set()

    @handlers.on("order.created")
    async def created(event: Event) -> None:
        await asyncio.sleep(0)
        seen.setdefault(event.key, []).append(number(event))

    @handlers.on("order.paid")
    def paid(event: Event) -> None:
        threads.add(threading.get_ident())
        seen.setdefault(event.key, []).append(number(event))

    keys = [f"key-{n}" for n in range(8)]
    for first in (1, 11):
        await store.add(mixed(keys, 5, first=first))
        await store.add(mixed(keys, 5, first=first + 5, type="order.paid"))
    async with relay(sql(), stream(handlers)):
        await settled(store, {Status.PUBLISHED: 160})
    assert seen == in_order(keys, 20)
    assert threading.get_ident() not in threads


async def test_a_handler_that_fails_holds_its_key_and_one_that_rejects_ends_its_event(
    sql: SqlOutbox, store: Store
) -> None:
    handlers = Handlers()
    seen: list[int] = []
    tries: list[int] = []

    @handlers.on("order.created")
    async def created(event: Event) -> None:
        if number(event) == 2:
            tries.append(1)
            if len(tries) < 3:
                raise ConnectionError("busy")
        if number(event) == 4:
            raise Reject("no such customer")
        seen.append(number(event))

    await store.add(numbered("k", 6))
    async with relay(sql(), stream(handlers)):
        await settled(store, {Status.PUBLISHED: 5, Status.DEAD: 1})
    assert seen == [1, 2, 3, 5, 6]


async def test_events_go_to_a_file(sqlite: SqlOutbox, store: SqlStore, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    keys = ["a", "b", "c"]
    await store.add(mixed(keys, 20))
    async with relay(sqlite(), stream(file.as_uri())):
        await settled(store, {Status.PUBLISHED: 60})
    found: dict[str, list[int]] = {}
    for line in file.read_text().splitlines():
        event = json.loads(line)
        payload = event["payload"]
        found.setdefault(event["key"], []).append((json.loads(payload) if isinstance(payload, str) else payload)["n"])
    assert found == in_order(keys, 20)
