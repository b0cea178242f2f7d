"""The consumer on a broker in memory: order, retries, dead events, rebalances, outages, and its end."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pillarbox import Consumer, Event, Fixed, Handlers, Outage, Reject
from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.consumer import State
from pillarbox.consumer.unreadable import UNREADABLE_TYPE
from pillarbox.errors import ConfigError, PillarboxError
from pillarbox.observe import Observer
from pillarbox.publisher import Outcome, PublisherFeatures, rejected, retry
from pillarbox.publishers.memory import MemoryPublisher
from pillarbox.sources.memory import MemorySource, MemoryTopic
from tests.integration.relays import WAIT, by_key, mixed, numbered, until

AT_ONCE = Fixed(0.0)


def consumer(topic: MemoryTopic, to: Any, *, name: str = "cards", **settings: Any) -> Consumer:
    return Consumer(name, MemorySource(topic), to=to, **{"dead_to": MemoryPublisher(), "retry": AT_ONCE, **settings})


def send(topic: MemoryTopic, events: Sequence[Event]) -> None:
    for event in events:
        topic.send(event)


def actions(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [getattr(record, "action", "") for record in caplog.records if record.levelname == level]


class Handled:
    """Handlers that collect what they get. ``fails`` raises for the events that it wants to fail."""

    def __init__(self, fails: Callable[[Event], None] = lambda event: None, **settings: Any) -> None:
        self.handlers = Handlers(**settings)
        self.events: list[Event] = []
        self.calls = 0

        @self.handlers.on("order.created")
        async def handle(event: Event) -> None:
            self.calls += 1
            await asyncio.sleep(0)
            fails(event)
            self.events.append(event)


@pytest.mark.asyncio
async def test_keys_are_handled_in_order_and_all_is_settled() -> None:
    topic, to = MemoryTopic(3), Handled()
    keys = [f"k{n}" for n in range(20)]
    send(topic, mixed(keys, 30))
    send(topic, numbered(None, 10))
    async with consumer(topic, to.handlers):
        await topic.wait_settled("cards", timeout=WAIT)
    found = by_key(to.events)
    assert sorted(found.pop(None)) == list(range(1, 11))
    assert found == {key: list(range(1, 31)) for key in keys}
    assert to.calls == len(to.events) == 610


@pytest.mark.asyncio
async def test_a_failing_key_waits_alone(caplog: pytest.LogCaptureFixture) -> None:
    mended = asyncio.Event()

    def fail(event: Event) -> None:
        if event.key == "bad" and not mended.is_set():
            raise RuntimeError("busy")

    topic, to = MemoryTopic(), Handled(fail)
    send(topic, mixed(["bad", "good"], 10))
    async with consumer(topic, to.handlers, retry=Fixed(0.01), max_attempts=1_000_000):
        await until(lambda: len(to.events) == 10)
        assert by_key(to.events) == {"good": list(range(1, 11))}
        assert topic.settled("cards") == [0]
        mended.set()
        await topic.wait_settled("cards", timeout=WAIT)
    assert by_key(to.events) == {key: list(range(1, 11)) for key in ("good", "bad")}
    assert "consumer 'cards': order.created" in caplog.text
    assert "failed, attempt 1 of 1000000, next in 0.0 s: RuntimeError: busy" in caplog.text


@pytest.mark.asyncio
async def test_a_dead_event_goes_to_its_destination_and_its_key_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        if event.payload == b'{"n": 2}':
            raise RuntimeError("never")

    class Named(MemoryPublisher):
        @property
        def default_address(self) -> str:
            return "cards.dead"

    topic, to, dead = MemoryTopic(), Handled(fail), Named()
    send(topic, numbered("k", 4, topic="cards"))
    async with consumer(topic, to.handlers, dead_to=dead, max_attempts=3):
        await topic.wait_settled("cards", timeout=WAIT)
    assert by_key(to.events) == {"k": [1, 3, 4]}
    assert to.calls == 6
    (letter,) = dead.deliveries
    assert (letter.payload, letter.key, letter.topic) == (b'{"n": 2}', "k", "")
    assert letter.headers == {
        "dead_error": "RuntimeError: never",
        "dead_consumer": "cards",
        "dead_topic": topic.name,
    }
    assert f"is dead after 3 attempts: RuntimeError: never; see {dead.description} cards.dead\n" in caplog.text


@pytest.mark.asyncio
async def test_a_rejected_event_is_dead_at_once() -> None:
    def fail(event: Event) -> None:
        raise Reject("no such card")

    topic, to, dead = MemoryTopic(), Handled(fail), MemoryPublisher()
    send(topic, numbered("k", 2))
    async with consumer(topic, to.handlers, dead_to=dead):
        await topic.wait_settled("cards", timeout=WAIT)
    assert to.calls == 2
    assert [letter.headers["dead_error"] for letter in dead.deliveries] == ["no such card"] * 2


@pytest.mark.asyncio
async def test_a_message_that_cannot_be_read_is_dead_in_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    topic, to, dead = MemoryTopic(), Handled(), MemoryPublisher()
    send(topic, numbered("k", 1))
    topic.put(b"\xff", key=b"k")
    send(topic, numbered("k", 1, first=2))
    async with consumer(topic, to.handlers, dead_to=dead):
        await topic.wait_settled("cards", timeout=WAIT)
    assert by_key(to.events) == {"k": [1, 2]}
    (letter,) = dead.deliveries
    assert (letter.type, letter.payload, letter.key) == (UNREADABLE_TYPE, b"\xff", "k")
    assert "was rejected and is dead: the message has no id" in caplog.text


@pytest.mark.asyncio
async def test_a_place_is_an_id_where_asked() -> None:
    topic, to = MemoryTopic(), Handled()
    topic.put(b"{}", headers=[("event_type", b"order.created")])
    async with consumer(topic, to.handlers, ids="place"):
        await topic.wait_settled("cards", timeout=WAIT)
    assert [event.payload for event in to.events] == [b"{}"]


@pytest.mark.asyncio
async def test_an_own_decoder_and_one_that_breaks(caplog: pytest.LogCaptureFixture) -> None:
    def own(message: Any) -> Event:
        if message.body == b"break":
            raise KeyError("secret")
        if message.body == b"none":
            return None  # type: ignore[return-value]
        return make_event(key=None, payload=message.body)

    topic, to, dead = MemoryTopic(), Handled(), MemoryPublisher()
    for body in (b"1", b"break", b"none", b"2"):
        topic.put(body)
    async with consumer(topic, to.handlers, dead_to=dead, decoder=own):
        await topic.wait_settled("cards", timeout=WAIT)
    assert sorted(event.payload for event in to.events) == [b"1", b"2"]
    errors = {letter.headers["dead_error"] for letter in dead.deliveries}
    assert errors == {"the decoder raised KeyError", "the decoder raised TypeError"}
    assert actions(caplog, "ERROR").count("decoder_failed") == 2
    assert "the decoder returned a NoneType; return an Event, or raise Reject" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [b'"type":["a"]', b'"partitionkey":{"a":1}', b'"aggregateversion":' + b"9" * 30])
async def test_a_message_with_a_wrong_value_holds_nobody_up(value: bytes) -> None:
    topic, to, dead = MemoryTopic(), Handled(), MemoryPublisher()
    topic.put(b'{"id":"1",%b}' % value, headers=[("content-type", b"application/cloudevents+json")])
    send(topic, numbered("k", 1))
    async with consumer(topic, to.handlers, dead_to=dead) as cards:
        await topic.wait_settled("cards", timeout=WAIT)
        assert cards.state is State.RUNNING
    assert by_key(to.events) == {"k": [1]}
    assert len(dead.deliveries) == 1


@pytest.mark.asyncio
async def test_a_type_without_a_handler_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pillarbox")
    topic, to = MemoryTopic(), Handled()
    send(topic, [make_event(type="other"), *numbered("k", 1)])
    async with consumer(topic, to.handlers):
        await topic.wait_settled("cards", timeout=WAIT)
    assert len(to.events) == 1
    (told,) = [record for record in caplog.records if getattr(record, "action", "") == "no_handler"]
    assert (
        told.getMessage() == "no handler for event type 'other' in consumer 'cards': its events are skipped, 1 so far"
    )
    assert (vars(told)["consumer"], "stream" in vars(told)) == ("cards", False)


@pytest.mark.asyncio
async def test_an_outage_charges_nothing_and_keeps_the_order(caplog: pytest.LogCaptureFixture) -> None:
    mended = asyncio.Event()

    def fail(event: Event) -> None:
        if not mended.is_set():
            raise Outage("the card service is away")

    topic, to = MemoryTopic(2), Handled(fail)
    send(topic, mixed(["a", "b", "c"], 20))
    async with consumer(topic, to.handlers, max_attempts=1):
        await until(lambda: "circuit_opened" in actions(caplog, "WARNING"))
        assert topic.settled("cards") == [0, 0]
        mended.set()
        await topic.wait_settled("cards", timeout=WAIT)
    assert by_key(to.events) == {key: list(range(1, 21)) for key in "abc"}
    assert {event.attempts for event in to.events} == {0}
    assert "circuit_closed" in actions(caplog, "WARNING")


@pytest.mark.asyncio
async def test_a_full_window_pauses_its_lane(caplog: pytest.LogCaptureFixture) -> None:
    topic, to = MemoryTopic(), MemoryPublisher(features=PublisherFeatures(calls=1))
    to.hold()
    source = MemorySource(topic)
    cards = Consumer("cards", source, to=to, dead_to=MemoryPublisher(), window=20)
    first = numbered("a", 20)
    send(topic, first)
    async with cards:
        await until(lambda: topic.paused("cards") == [True])
        send(topic, numbered("a", 100, first=21))
        to.release()
        await topic.wait_settled("cards", timeout=WAIT)
        assert topic.paused("cards") == [False]
    assert by_key(to.deliveries) == {"a": list(range(1, 121))}


@pytest.mark.asyncio
@pytest.mark.parametrize(("key", "note"), [(b"k", b"x" * 10_000), (b"x" * 10_000, b"")])
async def test_headers_and_keys_fill_a_window_too(key: bytes, note: bytes) -> None:
    topic, to = MemoryTopic(), MemoryPublisher(features=PublisherFeatures(calls=1))
    to.hold()
    topic.put(b"", key=key, headers=[("event_id", b"1"), ("note", note)])
    async with consumer(topic, to, window_bytes=10_000):
        await until(lambda: topic.paused("cards") == [True])
        to.release()
        await topic.wait_settled("cards", timeout=WAIT)


@pytest.mark.asyncio
async def test_a_stop_finishes_what_runs_and_settles_it() -> None:
    topic, to = MemoryTopic(), MemoryPublisher()
    to.hold()
    send(topic, numbered("a", 5))
    cards = consumer(topic, to)
    await cards.start()
    await to.wait_until_held(timeout=WAIT)
    stopping = asyncio.create_task(cards.stop())
    await asyncio.sleep(0)
    to.release()
    await stopping
    count = len(to.deliveries)
    assert count
    assert topic.settled("cards") == [count]
    async with consumer(topic, to):
        await topic.wait_settled("cards", timeout=WAIT)
    assert by_key(to.deliveries) == {"a": [1, 2, 3, 4, 5]}
    assert cards.state is State.STOPPED


@pytest.mark.asyncio
async def test_a_stop_ends_within_its_grace(caplog: pytest.LogCaptureFixture) -> None:
    hangs = asyncio.Event()

    class Hanging(MemoryPublisher):
        async def publish(self, batch: Batch) -> Sequence[Outcome]:
            hangs.set()
            await asyncio.Event().wait()
            raise AssertionError

    topic = MemoryTopic()
    send(topic, numbered("a", 2))
    async with asyncio.timeout(WAIT):
        async with consumer(topic, Hanging(), grace=0.1):
            await hangs.wait()
    assert topic.settled("cards") == [0]
    assert "left_behind" in actions(caplog, "ERROR")


@pytest.mark.asyncio
async def test_a_revoked_lane_is_finished_first() -> None:
    topic, to = MemoryTopic(), MemoryPublisher(features=PublisherFeatures(calls=1, first_batch=2))
    send(topic, numbered("a", 6))
    to.hold()
    async with consumer(topic, to):
        await to.wait_until_held(timeout=WAIT)
        revoking = asyncio.create_task(topic.revoke("cards", 0))
        await asyncio.sleep(0)
        assert not revoking.done()
        to.release()
        await revoking
        await topic.wait_settled("cards", timeout=WAIT)
    assert by_key(to.deliveries) == {"a": [1, 2, 3, 4, 5, 6]}


@pytest.mark.asyncio
async def test_the_results_of_a_lost_lane_are_dropped() -> None:
    topic, to = MemoryTopic(), MemoryPublisher(features=PublisherFeatures(calls=1, first_batch=2))
    send(topic, numbered("a", 4))
    to.hold()
    async with consumer(topic, to):
        await to.wait_until_held(timeout=WAIT)
        await topic.lose("cards", 0)
        assert topic.settled("cards") == [0]
        to.release()
        await topic.wait_settled("cards", timeout=WAIT)
    # The first ones were in a call when their lane was lost: they came again.
    assert by_key(to.deliveries)["a"][-4:] == [1, 2, 3, 4]
    assert len(to.deliveries) > 4


@pytest.mark.asyncio
async def test_two_consumers_share_the_lanes_and_keep_the_order() -> None:
    topic, first, second = MemoryTopic(4), Handled(), Handled()
    keys = [f"k{n}" for n in range(12)]
    events = mixed(keys, 40)
    send(topic, events[:200])
    async with consumer(topic, first.handlers):
        await until(lambda: len(first.events) > 20)
        async with consumer(topic, second.handlers) as other:
            await other.ready()
            send(topic, events[200:])
            await topic.wait_settled("cards", timeout=WAIT)
    assert first.events
    assert second.events
    for key in keys:
        own = [n for to in (first, second) for n in by_key(to.events).get(key, [])]
        assert sorted(own) == list(range(1, 41)), "an event came twice, or not at all"
        assert all(found == sorted(found) for to in (first, second) if (found := by_key(to.events).get(key)))


@pytest.mark.asyncio
async def test_blocked_events_hold_their_key(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        if event.key == "bad":
            raise RuntimeError("never")

    topic, to = MemoryTopic(), Handled(fail)
    send(topic, mixed(["bad", "good"], 3))
    async with consumer(topic, to.handlers, on_dead="block", dead_to=None, max_attempts=2):
        await until(lambda: "blocked" in actions(caplog, "ERROR") and len(to.events) == 3)
    assert by_key(to.events) == {"good": [1, 2, 3]}
    assert topic.settled("cards") == [0]
    assert "key bad blocks its key after 2 attempts, next in 5 min: RuntimeError: never" in caplog.text


@pytest.mark.asyncio
async def test_a_dead_event_that_cannot_be_kept_holds_its_key(caplog: pytest.LogCaptureFixture) -> None:
    topic, to, dead = MemoryTopic(), MemoryPublisher(), MemoryPublisher()
    to.fail_next(rejected("no"), key="a")
    send(topic, mixed(["a", "b"], 3))
    dead.down()
    async with consumer(topic, to, dead_to=dead):
        await until(lambda: "bury_failed" in actions(caplog, "ERROR") and by_key(to.deliveries).get("b") == [1, 2, 3])
        assert topic.settled("cards") == [0]
        dead.up()
        await topic.wait_settled("cards", timeout=WAIT)
    assert by_key(to.deliveries) == {"a": [2, 3], "b": [1, 2, 3]}
    assert len(dead.deliveries) == 1


@pytest.mark.asyncio
async def test_a_broker_that_goes_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    topic, to = MemoryTopic(), Handled()
    topic.down("connection refused")
    async with consumer(topic, to.handlers) as cards:
        await until(lambda: "open_failed" in actions(caplog, "WARNING"))
        assert cards.state is State.STARTING
    topic.up()
    async with consumer(topic, to.handlers) as cards:
        await cards.ready()
        assert cards.state is State.RUNNING
        topic.down("connection refused")
        await until(lambda: "source_down" in actions(caplog, "WARNING"))
        topic.up()
        send(topic, numbered("a", 3))
        await topic.wait_settled("cards", timeout=WAIT)
    assert by_key(to.events) == {"a": [1, 2, 3]}
    assert "source_up" in actions(caplog, "WARNING")


@pytest.mark.asyncio
async def test_a_dead_source_ends_the_consumer_but_not_the_application(caplog: pytest.LogCaptureFixture) -> None:
    topic, to = MemoryTopic(), Handled()
    source = MemorySource(topic)
    cards = Consumer("cards", source, to=to.handlers, dead_to=MemoryPublisher())
    async with cards:
        await cards.ready()
        source.die(RuntimeError("the thread is dead"))
        await until(lambda: cards.state is State.FAILED)
        assert "consumer_failed" in actions(caplog, "ERROR")
        with pytest.raises(RuntimeError, match="the thread is dead"):
            await cards.ready()
        assert str(cards.error) == "the thread is dead"
    send(topic, numbered("a", 1))
    async with cards:
        await topic.wait_settled("cards", timeout=WAIT)
    assert len(to.events) == 1


@pytest.mark.asyncio
async def test_run_raises_when_the_source_dies() -> None:
    topic, to = MemoryTopic(), Handled()
    source = MemorySource(topic)
    cards = Consumer("cards", source, to=to.handlers, dead_to=MemoryPublisher())
    running = asyncio.create_task(cards.run())
    await until(lambda: cards.state is State.RUNNING)
    source.die(ConfigError("the topic was deleted; make it again"))
    with pytest.raises(ConfigError, match="the topic was deleted"):
        await asyncio.wait_for(running, WAIT)


@pytest.mark.asyncio
async def test_a_destination_that_cannot_be_closed_hides_no_error_and_holds_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stuck(MemoryPublisher):
        async def close(self) -> None:
            raise RuntimeError("no thread is there")

    class Closed(MemoryPublisher):
        is_closed = False

        async def close(self) -> None:
            self.is_closed = True

    source, dead = MemorySource(), Closed()
    cards = Consumer("cards", source, to=Stuck(), dead_to=dead)
    running = asyncio.create_task(cards.run())
    await until(lambda: cards.state is State.RUNNING)
    source.die(ConfigError("the topic was deleted; make it again"))
    with pytest.raises(ConfigError, match="the topic was deleted"):
        await asyncio.wait_for(running, WAIT)
    assert dead.is_closed
    assert "left_behind" in actions(caplog, "ERROR")
    assert "no thread is there" in caplog.text


@pytest.mark.asyncio
async def test_run_raises_a_setting_that_is_wrong() -> None:
    class Wrong(MemorySource):
        async def open(self, consumer: str, lanes: Any) -> None:
            raise ConfigError("there is no topic 'cads'; did you mean 'cards'?")

    cards = Consumer("cards", Wrong(), to=Handled().handlers, dead_to=MemoryPublisher())
    with pytest.raises(ConfigError, match="did you mean 'cards'"):
        await asyncio.wait_for(cards.run(), WAIT)


@pytest.mark.asyncio
async def test_a_failed_lane_is_told(caplog: pytest.LogCaptureFixture) -> None:
    topic, to = MemoryTopic(2), Handled()
    async with consumer(topic, to.handlers) as cards:
        await cards.ready()
        topic.fail("cards", 0, "its messages were deleted")
        topic.put(b"", lane=0)
        topic.send(numbered("k", 1)[0], lane=1)
        await until(lambda: topic.settled("cards") == [0, 1])
    assert "memory/0 brings no more messages: its messages were deleted" in caplog.text


@pytest.mark.asyncio
async def test_observers_learn_of_events() -> None:
    class Counts(Observer):
        def __init__(self) -> None:
            self.results: list[str] = []

        def after_consume(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
            assert batch.stream == "cards"
            self.results += [outcome.result for outcome in outcomes]

    topic, to, counts = MemoryTopic(), MemoryPublisher(), Counts()
    to.fail_next(retry("busy"))
    send(topic, numbered("a", 1))
    async with consumer(topic, to, observers=[counts]):
        await topic.wait_settled("cards", timeout=WAIT)
    assert counts.results == ["retry", "published"]


def test_ready_needs_a_consumer_that_runs() -> None:
    with pytest.raises(ConfigError, match=r"ready\(\) needs a consumer that runs"):
        asyncio.run(consumer(MemoryTopic(), MemoryPublisher()).ready())


@pytest.mark.asyncio
async def test_a_stop_tells_those_who_wait() -> None:
    topic = MemoryTopic()
    topic.down()
    cards = consumer(topic, MemoryPublisher())
    await cards.start()
    waiting = asyncio.create_task(cards.ready())
    await asyncio.sleep(0)
    with pytest.raises(ConfigError, match="runs already"):
        await cards.start()
    await cards.stop()
    await cards.stop()
    with pytest.raises(PillarboxError, match="the consumer was stopped before it had its source"):
        await waiting


def test_a_consumer_works_in_one_event_loop_after_the_other() -> None:
    topic, to = MemoryTopic(), Handled()
    cards = consumer(topic, to.handlers)

    async def one(number: int) -> None:
        send(topic, numbered("a", 1, first=number))
        async with cards:
            await topic.wait_settled("cards", timeout=WAIT)

    for number in (1, 2):
        asyncio.run(one(number))
    assert by_key(to.events) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dead_to": None}, r"consumer 'cards' has no place for dead events; give it store=, or dead_to="),
        ({"on_dead": "blok"}, r"on_dead='blok': did you mean 'block'\?"),
        ({"on_dead": "block"}, "with on_dead='block' no event goes to dead_to"),
        ({"store": "memory:"}, "dead letters go into the store; leave out dead_to, or the store"),
        ({"window": 0}, "window is 0; use 1 to 1000000"),
        ({"max_attempts": True}, "max_attempts is True"),
        ({"retry": "fixt:1s"}, r"consumer 'cards': retry is 'fixt:1s'; did you mean 'fixed'\?"),
        ({"ids": "place", "decoder": print}, "leave out ids or decoder"),
        ({"decoder": asyncio.sleep}, "decoder is async; pass a plain function of a message"),
        ({"name": ""}, "the name of a consumer cannot be used: consumer is empty"),
        ({"to": print}, "is no destination; register functions with Handlers"),
    ],
)
def test_a_wrong_setting_names_itself(settings: dict[str, Any], said: str) -> None:
    given = {"to": MemoryPublisher(), **settings}
    with pytest.raises(ConfigError, match=said):
        consumer(MemoryTopic(), given.pop("to"), **given)


def test_a_source_is_a_url_or_an_object() -> None:
    with pytest.raises(ConfigError, match=r"a source URL cannot start with 'kafak'; did you mean 'kafka'\?"):
        Consumer("cards", "kafak://localhost", to=MemoryPublisher(), dead_to=MemoryPublisher())
    with pytest.raises(ConfigError, match="a object is no source; pass a URL"):
        Consumer("cards", object(), to=MemoryPublisher(), dead_to=MemoryPublisher())  # type: ignore[arg-type]
