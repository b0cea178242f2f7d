"""Checks in every form that users can write, and checks that are refused."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from pillarbox import Check, Event, Outbox, Relay, Stream, stable_id
from pillarbox.errors import CheckFailed, ConfigError
from pillarbox.ids import uuid7
from pillarbox.maintenance.check import batches

OUTBOX = Outbox()
WAIT = 10.0


def event(number: int, **fields: Any) -> Event:
    return OUTBOX.event("page.saved", {"n": number}, **{"id": stable_id("page", number), **fields})


EVENTS = [event(n) for n in range(3)]


def plain_list() -> list[Event]:
    return EVENTS


def plain_iterator() -> Iterator[Event]:
    return iter(EVENTS)


def generator() -> Iterator[Event]:
    yield from EVENTS


async def async_list() -> list[Event]:
    await asyncio.sleep(0)
    return EVENTS


async def async_generator() -> AsyncIterator[Event]:
    for each in EVENTS:
        await asyncio.sleep(0)
        yield each


async def async_that_returns_a_generator() -> AsyncIterator[Event]:
    return async_generator()


class Finder:
    def __call__(self) -> Iterator[Event]:
        yield from EVENTS

    def method(self) -> Iterator[Event]:
        yield from EVENTS


class AsyncFinder:
    async def __call__(self) -> AsyncIterator[Event]:
        for each in EVENTS:
            yield each


class AsyncPages:
    """An iterator that is no generator, as a cursor is."""

    def __init__(self) -> None:
        self._rest = list(EVENTS)

    def __aiter__(self) -> "AsyncPages":
        return self

    async def __anext__(self) -> Event:
        if not self._rest:
            raise StopAsyncIteration
        return self._rest.pop(0)


def never() -> bool:
    return False


async def pull(find: Any, is_stopped: Callable[[], bool] = never) -> list[Event]:
    found = []
    async for batch in batches(Check("pages", find), is_stopped):
        found += batch
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "find",
    [
        plain_list,
        plain_iterator,
        generator,
        async_list,
        async_generator,
        async_that_returns_a_generator,
        Finder(),
        Finder().method,
        AsyncFinder(),
        AsyncPages,
        partial(generator),
        partial(async_generator),
        lambda: async_generator(),
        lambda: async_list(),
    ],
)
async def test_every_form_gives_its_events_in_order(find: Any) -> None:
    assert await pull(find) == EVENTS


@pytest.mark.asyncio
async def test_a_plain_one_runs_in_one_thread_that_is_not_the_loops_and_ends() -> None:
    threads = []

    def find() -> Iterator[Event]:
        try:
            for number in range(250):
                threads.append(threading.current_thread())
                yield event(number)
        finally:
            threads.append(threading.current_thread())

    assert len(await pull(find)) == 250
    (thread,) = set(threads)
    assert thread is not threading.current_thread()
    await asyncio.to_thread(thread.join, WAIT)
    assert not thread.is_alive()


@pytest.mark.asyncio
async def test_an_async_one_runs_in_one_task() -> None:
    tasks = set()

    async def find() -> AsyncIterator[Event]:
        try:
            for number in range(250):
                tasks.add(asyncio.current_task())
                yield event(number)
        finally:
            tasks.add(asyncio.current_task())

    assert len(await pull(find)) == 250
    assert tasks == {asyncio.current_task()}


@pytest.mark.asyncio
@pytest.mark.parametrize("is_async", [False, True])
async def test_large_payloads_come_a_few_at_a_time(is_async: bool) -> None:
    def find() -> Iterator[Event]:
        for number in range(10):
            yield event(number)._replace(payload=bytes(1_000_000))

    async def find_async() -> AsyncIterator[Event]:
        for each in find():
            yield each

    sizes = [len(batch) async for batch in batches(Check("pages", find_async if is_async else find), never)]
    assert sizes == [4, 4, 2]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_came_before_an_error_is_given_first(is_async: bool) -> None:
    def find() -> Iterator[Event]:
        yield from EVENTS
        raise ZeroDivisionError("a bug\nof two lines")

    async def find_async() -> AsyncIterator[Event]:
        for each in find():
            yield each

    finding = batches(Check("pages", find_async if is_async else find), never)
    assert await anext(finding) == EVENTS
    with pytest.raises(CheckFailed, match=r"'pages' failed with ZeroDivisionError: a bug of two lines \(test_check.py"):
        await anext(finding)


def raising(error: BaseException) -> Callable[[], Any]:
    def find() -> Any:
        raise error

    return find


def raising_async(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def find() -> Any:
        raise error

    return find


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [raising, raising_async])
@pytest.mark.parametrize("error", [ValueError(), StopIteration(), SystemExit(1)])
async def test_an_error_of_the_call_is_the_checks(make: Callable[[BaseException], Any], error: BaseException) -> None:
    # Python itself turns StopIteration in a coroutine into a RuntimeError.
    with pytest.raises(CheckFailed, match=f"{type(error).__name__}|RuntimeError"):
        await pull(make(error))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "returned a NoneType; yield events, or return a list"),
        (EVENTS[0], "returned a Event"),
        ("text", "returned a str"),
        (7, "returned a int"),
        ([{"page": 7}], "yielded a dict; yield events made by outbox.event"),
        ([None], "yielded a NoneType"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_is_no_event_is_refused(found: Any, said: str, is_async: bool) -> None:
    async def find() -> Any:
        return found

    with pytest.raises(CheckFailed, match=said):
        await pull(find if is_async else lambda: found)


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [lambda: OUTBOX.event("page.saved", {}), lambda: event(1, id=uuid7())])
async def test_an_id_that_was_made_in_this_run_is_refused(make: Callable[[], Event]) -> None:
    with pytest.raises(CheckFailed, match=r"type 'page.saved' with a new id.*id=stable_id\("):
        await pull(lambda: [make()])


@pytest.mark.asyncio
async def test_an_id_that_the_application_keeps_is_accepted() -> None:
    before = uuid7()

    def find() -> Iterator[Event]:
        yield event(1, id=before)
        yield event(2, id=uuid4())
        # Data that was written while this run went on, seen two seconds later.
        made = event(3, id=uuid7())
        yield made._replace(created_at=made.created_at.fromtimestamp(time.time() + 2, made.created_at.tzinfo))

    assert len(await pull(find)) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("is_async", [False, True])
async def test_it_is_closed_when_nobody_wants_more(is_async: bool) -> None:
    closed = []

    def find() -> Iterator[Event]:
        try:
            for number in range(1_000_000):
                yield event(number)
        finally:
            closed.append(number)
            raise OSError("while closing")

    async def find_async() -> AsyncIterator[Event]:
        try:
            for number in range(1_000_000):
                yield event(number)
        finally:
            closed.append(number)
            raise OSError("while closing")

    finding = batches(Check("pages", find_async if is_async else find), never)
    assert len(await anext(finding)) == 100
    await finding.aclose()
    assert closed == [99]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_async", [False, True])
async def test_it_ends_between_two_events(is_async: bool) -> None:
    seen: list[int] = []

    def find() -> Iterator[Event]:
        for number in range(1_000_000):
            seen.append(number)
            yield event(number)

    async def find_async() -> AsyncIterator[Event]:
        for each in find():
            yield each

    await pull(find_async if is_async else find, lambda: len(seen) > 5)
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": None}, "name is None"),
        ({"find": EVENTS}, "check 'pages': find is a list"),
        ({"find": lambda session: []}, "without arguments: missing a required argument: 'session'"),
        ({"every": 0}, "every is 0; use 1ms to"),
        ({"every": float("nan")}, "every is nan; use a duration"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_a_check_that_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Check(**{"name": "pages", "find": generator, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"checks": [Check("a", generator), Check("a", plain_list)]}, "check 'a' is named twice"),
        ({"checks": [generator]}, "checks holds a function"),
        ({"checks": [Check("a", generator)], "keep_published": 0}, "keep_published is 0"),
    ],
)
def test_a_relay_refuses_checks_that_cannot_work(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Relay("memory:", [Stream("default", to="stdout:")], **options)
