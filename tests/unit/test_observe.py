"""Observers: each call is reported as it happened, a broken observer disturbs nobody, and none costs nothing."""

import asyncio
import inspect
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from pillarbox.batch import Batch, Part
from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, StoreDown
from pillarbox.event import Status
from pillarbox.observe import Observer, Observers, observed_publisher, observed_store
from pillarbox.observe.wrappers import _CALLS
from pillarbox.publisher import PUBLISHED, Needs, Outcome
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.store import (
    Claim,
    ClaimResults,
    Failure,
    Grant,
    HoldMode,
    KeyRun,
    Page,
    Progress,
    Rescued,
    Settlement,
    Store,
)
from pillarbox.stores.memory import MemoryStore

HOOKS = [name for name in vars(Observer) if not name.startswith("_")]
ONE, TWO = (make_event(key="a", stream="orders") for _ in range(2))
KEPT, LOST = Grant("orders", 0, "ann", 7), Grant("orders", 3, "ann", 8)
GRANTS = [KEPT, LOST]
PARTS = [Part(0, 7, [ONE])]
SETTLEMENTS = [Settlement(KEPT, published=[ONE]), Settlement(LOST, dead=[Failure(TWO, "refused", 1)])]
CLAIMS = [Claim(ONE, 7), Claim(TWO, 8)]
RESULTS = ClaimResults(published=[ONE, TWO])
BATCH = Batch("orders", PARTS)


class Reported(NamedTuple):
    """One call: what the store is asked and answers, and what hooks learn of it."""

    verb: str
    arguments: tuple[Any, ...]
    answer: Any
    hook: str
    before: tuple[Any, ...]
    learned: tuple[Any, ...]  # by the hook that runs afterwards, in addition


CALLS = [
    Reported("take", ("orders", "ann", 4, 15.0), GRANTS, "take", ("orders",), (GRANTS,)),
    Reported("renew", (GRANTS, 15.0), {KEPT}, "renew", (GRANTS,), ([LOST],)),
    Reported("give", (GRANTS,), None, "give", (GRANTS,), ()),
    Reported("read", (GRANTS, 100, 4000), PARTS, "read", (GRANTS,), (PARTS,)),
    Reported("read_due", (KEPT, 100, 4000), None, "read", ([KEPT],), ([],)),
    Reported(
        "read_due", (KEPT, 100, 4000), KeyRun("a", HoldMode.RETRYING, [ONE]), "read", ([KEPT],), ([Part(0, 7, [ONE])],)
    ),
    Reported("settle_ticket", (KEPT, b"ticket"), Progress(None, 2), "recover", (KEPT, b"ticket"), (Progress(None, 2),)),
    Reported("settle", (SETTLEMENTS,), {0: {"a"}}, "settle", (SETTLEMENTS,), (SETTLEMENTS[1:],)),
    Reported("claim", ("jobs", 3, "ann", 4, 15.0), CLAIMS, "claim", ("jobs",), (CLAIMS,)),
    Reported("renew_claims", (CLAIMS, 15.0), {ONE.id}, "renew_claims", (CLAIMS,), (CLAIMS[1:],)),
    Reported("settle_claims", (CLAIMS, RESULTS), 1, "settle_claims", (CLAIMS, RESULTS), (1,)),
    Reported("rescue", ("jobs", 600.0, 100), Rescued(2, 1), "rescue", ("jobs",), (Rescued(2, 1),)),
    Reported("prune_published", (3600.0, 100, 7), Page(5, 9), "prune", (Status.PUBLISHED,), (5,)),
    Reported("prune_dead", (3600.0, 100), 4, "prune", (Status.DEAD,), (4,)),
]


class Recorder(Observer):
    """Overrides every hook, and notes each call with its arguments but for the seconds."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []


def _recording(name: str) -> Any:
    signature = inspect.signature(getattr(Observer, name))

    def hook(self: Recorder, *arguments: Any) -> None:
        values = dict(signature.bind(self, *arguments).arguments)
        assert values.pop("seconds", 0.5) > 0
        self.seen.append((name, *list(values.values())[1:]))

    return hook


for _hook in HOOKS:
    setattr(Recorder, _hook, _recording(_hook))


def answering(verb: str, answer: Any) -> Store:
    async def call(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return cast(Store, SimpleNamespace(**{**dict.fromkeys(_CALLS), verb: call}))


@pytest.mark.asyncio
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.verb)
async def test_each_call_of_a_store_is_reported(call: Reported) -> None:
    recorder = Recorder()
    store = observed_store(answering(call.verb, call.answer), Observers([recorder]))

    assert await getattr(store, call.verb)(*call.arguments) == call.answer

    before = (f"before_{call.hook}", *call.before)
    assert recorder.seen == [before, (f"after_{call.hook}", *call.before, *call.learned)]


def test_every_reported_call_is_tried_here() -> None:
    assert {call.verb: call.hook for call in CALLS} == _CALLS
    reported = {f"{when}_{call}" for when in ("before", "after") for call in (*_CALLS.values(), "publish", "consume")}
    changes = {"circuit_changed", "consumer_circuit_changed", "consumer_reported", "event_buried", "sampled", "serves"}
    told = {*changes, "added", "call_failed", "inbox_asked", "request_served"}
    assert set(HOOKS) == reported | told


@pytest.mark.asyncio
async def test_a_publish_is_reported() -> None:
    recorder, publisher = Recorder(), MemoryPublisher()
    observed = observed_publisher(publisher, Observers([recorder]))
    await observed.open()

    assert await observed.publish(BATCH) == [PUBLISHED]

    assert recorder.seen == [("before_publish", BATCH), ("after_publish", BATCH, [PUBLISHED])]
    assert publisher.deliveries == [ONE]
    assert observed.features is publisher.features


@pytest.mark.asyncio
async def test_a_publisher_that_is_prepared_for_a_stream_is_observed_too() -> None:
    class Chosen(MemoryPublisher):
        def prepared(self, needs: Needs) -> MemoryPublisher:
            return other

    recorder, other = Recorder(), MemoryPublisher()
    prepared = observed_publisher(Chosen(), Observers([recorder])).prepared(Needs("orders", 4, False))
    await prepared.open()
    await prepared.publish(BATCH)

    assert other.deliveries == [ONE]
    assert recorder.seen == [("before_publish", BATCH), ("after_publish", BATCH, [PUBLISHED])]


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [StoreDown("away"), asyncio.CancelledError(), ValueError("a bug")])
async def test_a_call_that_raises_is_reported_with_its_error(error: BaseException) -> None:
    recorder = Recorder()
    store = observed_store(answering("settle", error), Observers([recorder]))

    with pytest.raises(type(error)):
        await store.settle(SETTLEMENTS)

    assert recorder.seen == [("before_settle", SETTLEMENTS), ("call_failed", "settle", (SETTLEMENTS,), error)]


@pytest.mark.asyncio
async def test_a_publish_that_is_cancelled_is_reported() -> None:
    recorder, publisher = Recorder(), MemoryPublisher()
    observed = observed_publisher(publisher, Observers([recorder]))
    await observed.open()
    publisher.hold()
    publishing = asyncio.create_task(observed.publish(BATCH))
    await publisher.wait_until_held()
    publishing.cancel()
    await asyncio.wait([publishing])

    (_, (hook, call, arguments, error)) = recorder.seen
    assert (hook, call, arguments, type(error)) == ("call_failed", "publish", (BATCH,), asyncio.CancelledError)


@pytest.mark.asyncio
async def test_an_observer_that_raises_is_logged_once_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def before_publish(self, batch: Batch) -> None:
            raise RuntimeError("broken before")

        def after_publish(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
            raise RuntimeError("broken after")

    recorder, publisher = Recorder(), MemoryPublisher()
    observed = observed_publisher(publisher, Observers([Broken(), recorder, Broken()]))
    await observed.open()
    with caplog.at_level(logging.ERROR, "pillarbox"):
        for _ in range(3):
            assert await observed.publish(BATCH) == [PUBLISHED]

    assert len(recorder.seen) == 6
    assert [record.__dict__["action"] for record in caplog.records] == ["observer_failed"] * 4
    assert "Broken.before_publish raised" in caplog.text
    assert "Broken.after_publish raised" in caplog.text


def test_without_observers_nothing_is_wrapped() -> None:
    store, publisher = MemoryStore(), MemoryPublisher()
    for observers in ([], [Observer()], [Observer(), Observer()]):
        assert observed_store(store, Observers(observers)) is store
        assert observed_publisher(publisher, Observers(observers)) is publisher


class Reads(Observer):
    """Overrides one hook."""

    def __init__(self) -> None:
        self.reads = 0

    def after_read(self, grants: Sequence[Grant], parts: Sequence[Part], seconds: float) -> None:
        self.reads += 1


@pytest.mark.asyncio
async def test_calls_that_nobody_follows_go_straight_to_the_store() -> None:
    store, reads = MemoryStore(), Reads()
    observed = observed_store(store, Observers([reads]))

    assert observed.read != store.read
    assert observed.read_due != store.read_due
    for verb in _CALLS.keys() - {"read", "read_due"}:
        assert getattr(observed, verb) == getattr(store, verb)
    assert observed.poll == store.poll
    assert (observed.description, observed.features) == (store.description, store.features)
    assert observed_publisher(publisher := MemoryPublisher(), Observers([reads])) is publisher
    await observed.migrate()
    await observed.open()
    assert await observed.read([KEPT], 10, 1000) == []
    await observed.close()
    assert reads.reads == 1


def test_changes_of_a_circuit_are_passed_on() -> None:
    one, other = Recorder(), Recorder()
    observers = Observers([one, Observer(), other])

    observers.circuit_changed("orders", "open")

    assert one.seen == other.seen == [("circuit_changed", "orders", "open")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (SimpleNamespace(), "SimpleNamespace is no observer; make it a subclass of pillarbox.observe.Observer"),
        (
            type("Typo", (Observer,), {"after_setle": print})(),
            "Typo.after_setle is no hook of an observer; did you mean 'after_settle'?",
        ),
    ],
)
def test_what_is_no_observer_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Observers([wrong])
    assert str(caught.value) == said
