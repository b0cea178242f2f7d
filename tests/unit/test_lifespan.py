"""The lifespan of an application with several services."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pillarbox import Consumer, Event, Handlers, Outbox, Relay, Stream, lifespan
from pillarbox.consumer import State
from pillarbox.errors import ConfigError
from pillarbox.sources.memory import MemorySource
from pillarbox.stores.memory import MemoryStore


@pytest.mark.asyncio
async def test_services_run_as_long_as_the_application() -> None:
    handlers, seen = Handlers(), []

    @handlers.on("a")
    async def note(event: Event) -> None:
        seen.append(event.type)

    @asynccontextmanager
    async def own(app: Any) -> AsyncIterator[dict[str, str]]:
        seen.append(f"own {app}")
        yield {"color": "red"}
        assert consumer.state is State.STOPPED

    source = MemorySource()
    consumer = Consumer("mailer", source, to=handlers, on_dead="block")
    relay = Relay(MemoryStore(), Stream("default", to=handlers))
    async with lifespan(relay, own, consumer)("app") as state:
        assert state == {"color": "red"}
        await consumer.ready()
        source.topic.send(Outbox().event("a", {}))
        await source.topic.wait_settled("mailer")
        with pytest.raises(ConfigError, match="runs already"):
            await relay.start()
    assert seen == ["own app", "a"]
    assert relay.missing() == ["start"]


@pytest.mark.asyncio
async def test_what_has_started_is_stopped_when_a_later_one_fails() -> None:
    relay = Relay(MemoryStore(), Stream("default", to="stdout:"))
    with pytest.raises(ConfigError, match="runs already"):
        async with lifespan(relay, relay)("app"):
            ...
    assert relay.missing() == ["start"]


@pytest.mark.parametrize(("wrong", "given"), [(Relay, "the class Relay"), (7.5, "a float"), ("relay", "a str")])
def test_other_objects_are_refused(wrong: Any, given: str) -> None:
    with pytest.raises(ConfigError, match=f"given {given}; pass relays, consumers, and lifespans of your own"):
        lifespan(wrong)


def test_a_destination_is_no_stream() -> None:
    wrong: Any = "kafka://localhost:9092?topic=orders"
    with pytest.raises(ConfigError, match=r'given a str as a stream; write Stream\("default", to=...\)'):
        Relay(MemoryStore(), [wrong])
