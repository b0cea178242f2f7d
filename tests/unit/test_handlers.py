import asyncio
import contextvars
import functools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.errors import ConfigError, Outage, Reject
from pillarbox.event import Event
from pillarbox.publisher import ERROR_LENGTH, PUBLISHED, UNTRIED, Limits, Needs, Outcome, Publisher, Result
from pillarbox.publishers import handlers as handlers_module
from pillarbox.publishers.handlers import Handlers
from pillarbox.relay import Fixed, Stream
from pillarbox.relay.destination import publisher_of
from pillarbox.threads import Thread

Function = Callable[[Event], Any]


@asynccontextmanager
async def opened(function: Function | None = None, **settings: Any) -> AsyncIterator[Handlers]:
    handlers = Handlers(**settings)
    if function is not None:
        handlers.on("*")(function)
    await handlers.open()
    try:
        yield handlers
    finally:
        await handlers.close()


async def outcome_of(function: Function, event: Event | None = None, **settings: Any) -> Outcome:
    async with opened(function, **settings) as handlers:
        (outcome,) = await handlers.publish(Batch.of([event or make_event()]))
    return outcome


def as_async(function: Function) -> Function:
    async def handler(event: Event) -> Any:
        return function(event)

    return handler


def raising(error: BaseException) -> Function:
    def handler(event: Event) -> None:
        raise error

    return handler


BOTH = pytest.mark.parametrize("kind", [as_async, lambda f: f], ids=["async", "plain"])


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Plain handlers wait for it; it is opened after the test, so that no thread outlives it."""
    event = threading.Event()
    yield event
    event.set()
    join_handler_threads()


def join_handler_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("pillarbox-handler"):
            thread.join(10)


class TestRegistry:
    def test_is_a_publisher(self) -> None:
        assert isinstance(Handlers(), Publisher)
        assert Handlers(concurrency=8).description == "handlers (8)"
        assert Handlers(concurrency=8).features.calls == 16
        assert Handlers(concurrency=40).features.calls == 40

    def test_a_handler_is_registered_once(self) -> None:
        handlers = Handlers()
        handlers.on("a", "b")(print)
        with pytest.raises(ConfigError, match=r"'b' has the handler print already; register it once"):
            handlers.on("c", "b")(print)
        handlers.on("c")(repr)

    @pytest.mark.parametrize("types", [(), ("",), ("order.*",)])
    def test_a_type_is_named_in_full(self, types: tuple[str, ...]) -> None:
        with pytest.raises(ConfigError, match=r'"\*"'):
            Handlers().on(*types)(print)

    def test_on_without_a_type_is_refused_where_it_stands(self) -> None:
        with pytest.raises(ConfigError, match=r'write @handlers.on\("order.created"\)'):

            @Handlers().on  # type: ignore[arg-type]
            def handler(event: Event) -> None: ...

    def test_the_rule_for_unknown_types_is_one_of_three(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown='rejected': did you mean 'reject'\?"):
            Handlers(unknown="rejected")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="unknown=None: use one of: wait, skip, reject"):
            Handlers(unknown=None)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("limits", "said"),
        [
            ({"max_attempts": 0}, "max_attempts=0: give 1 or more"),
            ({"retry": 5}, r'retry is of type int; pass a policy such as Fixed\("30s"\)'),
            ({"retry": "fixt:3s"}, r"retry is 'fixt:3s'; did you mean 'fixed'\?"),
        ],
    )
    def test_a_wrong_limit_of_a_handler_is_refused(self, limits: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            Handlers().on("a", "b", **limits)

    @pytest.mark.parametrize("timeout", [0, -1, float("nan")])
    def test_a_timeout_is_positive(self, timeout: float) -> None:
        with pytest.raises(ConfigError, match="timeout is"):
            Handlers(timeout=timeout)
        with pytest.raises(ConfigError, match="timeout is"):
            Handlers().on("a", timeout=timeout)

    @pytest.mark.parametrize("setting", ["concurrency", "max_hung", "grace"])
    def test_a_wrong_setting_names_itself(self, setting: str) -> None:
        with pytest.raises(ConfigError, match=f"{setting}(=| is )-1"):
            Handlers(**{setting: -1})  # type: ignore[arg-type]

    def test_what_cannot_be_a_handler_is_refused(self) -> None:
        def generator(event: Event) -> Iterator[None]:
            yield

        async def async_generator(event: Event) -> AsyncIterator[None]:
            yield

        def two_arguments(event: Event, context: object) -> None: ...

        for function, reason in [
            (generator, "yield"),
            (async_generator, "yield"),
            (functools.partial(generator), "yield"),
            (two_arguments, "only argument"),
            ("text", "not a str"),
        ]:
            with pytest.raises(ConfigError, match=reason):
                Handlers().on("a")(function)  # type: ignore[type-var]

    @pytest.mark.asyncio
    async def test_an_empty_registry_does_not_open(self) -> None:
        with pytest.raises(ConfigError, match="no handler is registered"):
            await Handlers().open()


class TestCalling:
    @pytest.mark.asyncio
    async def test_each_type_goes_to_its_handler(self) -> None:
        handlers, calls = Handlers(), []

        @handlers.on("order.created", "order.paid")
        async def orders(event: Event) -> None:
            calls.append(("orders", event.type))

        @handlers.on("*")
        def others(event: Event) -> None:
            calls.append(("others", event.type))

        await handlers.open()
        events = [make_event(type=t, key="k") for t in ("order.created", "order.paid", "mail.sent")]
        assert await handlers.publish(Batch.of(events)) == [PUBLISHED] * 3
        await handlers.close()
        assert calls == [("orders", "order.created"), ("orders", "order.paid"), ("others", "mail.sent")]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("unknown", ["wait", "reject"])
    async def test_a_type_without_a_handler_holds_its_key_and_names_the_remedy(self, unknown: Any) -> None:
        handlers = Handlers(unknown=unknown)
        handlers.on("a")(lambda event: None)
        await handlers.open()
        named = [("k", "b"), ("k", "a"), ("other", "a")]
        first, second, other = await handlers.publish(Batch.of([make_event(key=k, type=t) for k, t in named]))
        await handlers.close()
        assert first.error is not None
        assert "'b'" in first.error
        assert '@handlers.on("b")' in first.error
        assert (second, other) == (UNTRIED, PUBLISHED)
        if unknown == "wait":
            assert (first.result, first.charged, first.after_seconds) == (Result.RETRY, False, 30)
        else:
            assert first.result is Result.REJECTED

    @pytest.mark.asyncio
    async def test_a_type_without_a_handler_is_skipped_when_asked_for(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "pillarbox")
        handlers = Handlers(unknown="skip").prepared(Needs("mail", 3, strict_keys=False))
        handlers.on("a")(lambda event: None)
        await handlers.open()
        event = make_event(type="b")
        assert await handlers.publish(Batch.of([event])) == [PUBLISHED]
        await handlers.close()
        assert "no handler for event type 'b' in stream 'mail': its events are skipped, 1 so far" in caplog.text

    @pytest.mark.asyncio
    async def test_the_counts_of_types_without_a_handler_are_bounded(self, caplog: pytest.LogCaptureFixture) -> None:
        """A foreign producer can invent any number of types. A count that was dropped begins anew."""
        caplog.set_level(logging.INFO, "pillarbox")
        handlers = Handlers(unknown="skip").prepared(Needs("mail", 3, strict_keys=False))
        handlers.on("a")(lambda event: None)
        await handlers.open()
        for types in (["0"], [f"x{number}" for number in range(2000)], ["0"]):
            await handlers.publish(Batch.of([make_event(type=type) for type in types]))
        await handlers.close()
        assert caplog.text.count("event type '0' in stream 'mail': its events are skipped, 1 so far") == 2

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("handlers", "unhandled", "result"),
        [
            (Handlers(), "skip", Result.PUBLISHED),
            (Handlers(), "wait", Result.RETRY),
            (Handlers(unknown="wait"), "skip", Result.RETRY),
            (Handlers(unknown="reject"), "skip", Result.REJECTED),
        ],
    )
    async def test_a_consumer_skips_unless_something_else_is_asked_for(
        self, handlers: Handlers, unhandled: Literal["wait", "skip"], result: Result
    ) -> None:
        prepared = handlers.prepared(Needs("mail", 3, strict_keys=False, unhandled=unhandled))
        prepared.on(f"a-{unhandled}")(print)
        await prepared.open()
        (outcome,) = await prepared.publish(Batch.of([make_event(type="b")]))
        await prepared.close()
        assert outcome.result is result

    @pytest.mark.asyncio
    async def test_a_warning_for_an_unknown_type_is_not_repeated_at_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        handlers = Handlers()
        handlers.on("a")(lambda event: None)
        await handlers.open()
        for _ in range(2):
            await handlers.publish(Batch.of([make_event(type=type_) for type_ in "bbcc"]))
        await handlers.close()
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        assert "no handler for event type 'b' in stream 'default': its events wait, uncharged" in caplog.text

    @pytest.mark.asyncio
    async def test_where_a_handler_runs(self) -> None:
        variable = contextvars.ContextVar[str]("variable")
        variable.set("seen")
        seen = []

        def handler(event: Event) -> None:
            seen.append((threading.current_thread().name.rpartition("-")[0], variable.get()))

        await outcome_of(handler)
        await outcome_of(as_async(handler))
        assert seen == [("pillarbox-handler", "seen"), ("", "seen")]

    @pytest.mark.asyncio
    async def test_a_thread_is_kept_for_the_next_event(self) -> None:
        threads = set()
        async with opened(lambda event: threads.add(threading.get_ident())) as handlers:
            await handlers.publish(Batch.of([make_event(key="k") for _ in range(5)]))
        assert len(threads) == 1

    @pytest.mark.asyncio
    async def test_async_functions_in_disguise(self) -> None:
        class Callable:
            async def __call__(self, event: Event) -> None: ...

        async def handler(greeting: str, event: Event) -> None: ...

        assert await outcome_of(Callable()) == PUBLISHED
        assert await outcome_of(functools.partial(handler, "hello")) == PUBLISHED

    @pytest.mark.asyncio
    async def test_a_stream_has_a_publisher_of_its_own_with_the_same_functions(self) -> None:
        handlers = Handlers()
        other = handlers.prepared(Needs("mail", 3, strict_keys=False))
        handlers.on("*")(as_async(lambda event: None))
        await other.open()
        assert other.description == "handlers (3)"
        assert await other.publish(Batch.of([make_event()])) == [PUBLISHED]
        (outcome,) = await handlers.publish(Batch.of([make_event()]))
        assert outcome.is_outage
        await other.close()

    def test_a_concurrency_that_was_given_stands_in_a_relay(self) -> None:
        given, default = Handlers(concurrency=32), Handlers()
        assert publisher_of(Stream("mail", given)).description == "handlers (32)"
        assert publisher_of(Stream("mail", default)).description == "handlers (8)"
        assert publisher_of(Stream("mail", default, mode="queue", concurrency=3)).description == "handlers (3)"
        assert default.description == "handlers (16)"


@BOTH
class TestOutcomes:
    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("error", "result", "text"),
        [
            (Reject("no such customer"), Result.REJECTED, "no such customer"),
            (Reject(), Result.REJECTED, "rejected the event"),
            (Outage("the mail server is away"), Result.UNTRIED, "the mail server is away"),
            (Outage(), Result.UNTRIED, "reported an outage"),
            (ValueError("boom"), Result.RETRY, "ValueError: boom"),
            (ValueError(), Result.RETRY, "ValueError"),
            (StopIteration("boom"), Result.RETRY, "StopIteration"),
            (TimeoutError("boom"), Result.RETRY, "TimeoutError: boom"),
            (asyncio.CancelledError(), Result.RETRY, "CancelledError, though the relay did not cancel it"),
            (SystemExit(1), Result.RETRY, "must not stop the relay"),
        ],
    )
    async def test_an_exception(self, kind: Any, error: BaseException, result: Result, text: str) -> None:
        outcome = await outcome_of(kind(raising(error)))
        assert outcome.result is result
        assert outcome.charged
        assert text in (outcome.error or "")

    @pytest.mark.asyncio
    async def test_an_error_is_cut(self, kind: Any) -> None:
        outcome = await outcome_of(kind(raising(ValueError("x" * 10_000))))
        assert outcome.error is not None
        assert len(outcome.error) == ERROR_LENGTH

    @pytest.mark.asyncio
    @pytest.mark.parametrize("quote", [bytes.decode, repr, json.loads, lambda p: repr(p.decode())])
    async def test_an_error_never_quotes_the_payload(self, kind: Any, quote: Callable[[bytes], object]) -> None:
        event = make_event(payload=b'{"card": "4111 1111"}')
        outcome = await outcome_of(kind(raising(ValueError(f"bad card in {quote(event.payload)}"))), event)
        assert outcome.error == "ValueError: bad card in [payload]"

    @pytest.mark.asyncio
    async def test_a_broken_exception(self, kind: Any) -> None:
        class BrokenError(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        assert (await outcome_of(kind(raising(BrokenError())))).error == "BrokenError"

    @pytest.mark.asyncio
    @pytest.mark.parametrize("value", [False, True, 0, {}])
    async def test_a_return_value_is_ignored(self, kind: Any, value: object) -> None:
        assert await outcome_of(kind(lambda event: value)) == PUBLISHED

    @pytest.mark.asyncio
    async def test_an_outage_ends_the_call(self, kind: Any) -> None:
        called = []

        def handler(event: Event) -> None:
            called.append(event)
            raise Outage("away")

        async with opened(kind(handler), concurrency=1) as handlers:
            first, *others = await handlers.publish(Batch.of([make_event() for _ in range(5)]))
        assert first.is_outage
        assert others == [UNTRIED] * 4
        assert len(called) == 1

    @pytest.mark.asyncio
    @pytest.mark.parametrize("retry", [Fixed("30s"), "fixed:30s"])
    async def test_the_limits_of_a_handler_go_with_its_failure(self, kind: Any, retry: Any) -> None:
        handlers = Handlers()
        handlers.on("a", retry=retry, max_attempts=3)(kind(raising(ValueError("boom"))))
        await handlers.open()
        (outcome,) = await handlers.publish(Batch.of([make_event(type="a")]))
        await handlers.close()
        assert outcome.limits == Limits(Fixed("30s"), 3)

    @pytest.mark.asyncio
    async def test_a_forgotten_await_is_no_success(self, kind: Any) -> None:
        async def work() -> None: ...

        outcome = await outcome_of(kind(lambda event: work()))
        assert outcome.result is Result.RETRY
        assert "returned a coroutine that nobody awaited" in (outcome.error or "")

    def test_keyboard_interrupt_passes(self, kind: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(outcome_of(kind(raising(KeyboardInterrupt()))))


class TestOrder:
    @pytest.mark.asyncio
    async def test_keys_run_side_by_side_up_to_the_limit(self) -> None:
        barrier, running, most = asyncio.Barrier(3), 0, 0

        async def handler(event: Event) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await barrier.wait()
            running -= 1

        async with opened(handler, concurrency=3) as handlers:
            calls = [[make_event(), make_event(key=None)], [make_event(key=None) for _ in range(4)]]
            outcomes = await asyncio.gather(*(handlers.publish(Batch.of(events)) for events in calls))
        assert [len(o) for o in outcomes] == [2, 4]
        assert most == 3

    @pytest.mark.asyncio
    async def test_plain_handlers_run_side_by_side(self) -> None:
        barrier = threading.Barrier(3)
        async with opened(lambda event: (barrier.wait(10), None)[1], concurrency=3) as handlers:
            assert await handlers.publish(Batch.of([make_event() for _ in range(3)])) == [PUBLISHED] * 3

    @pytest.mark.asyncio
    async def test_one_event_of_a_key_at_a_time(self) -> None:
        log: list[tuple[str, int]] = []

        async def handler(event: Event) -> None:
            log.append(("start", event.seq))
            await asyncio.sleep(0)
            log.append(("end", event.seq))

        events = [make_event(key="k") for _ in range(4)]
        async with opened(handler) as handlers:
            await handlers.publish(Batch.of([*events, make_event(key=None, seq=0)]))
        own = [entry for entry in log if entry[1]]
        assert own == [(step, event.seq) for event in events for step in ("start", "end")]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("error", [ValueError(), Reject()])
    async def test_a_failure_holds_back_its_key_only(self, error: Exception) -> None:
        calls = []

        async def handler(event: Event) -> None:
            calls.append(event)
            if event.type == "bad":
                raise error

        named = [("a", "good"), ("a", "bad"), ("b", "good"), ("a", "bad"), ("a", "good")]
        events = [make_event(key=key, type=type_) for key, type_ in named]
        nones = [make_event(key=None, type="bad"), make_event(key=None)]
        async with opened(handler) as handlers:
            outcomes = await handlers.publish(Batch.of([*events, *nones]))
        assert [o == PUBLISHED for o in outcomes] == [True, False, True, False, False, False, True]
        assert list(outcomes[3:5]) == [UNTRIED, UNTRIED]
        assert not {events[3].id, events[4].id} & {event.id for event in calls}


class TestTimeouts:
    @pytest.mark.asyncio
    async def test_an_async_handler_is_cancelled(self) -> None:
        handlers, ends = Handlers(timeout=None), []

        @handlers.on("a", timeout=0.01)
        async def handler(event: Event) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ends.append("cancelled")

        await handlers.open()
        (outcome,) = await handlers.publish(Batch.of([make_event(type="a")]))
        await handlers.close()
        assert outcome.result is Result.RETRY
        assert "handler did not finish within 0.01 s" in (outcome.error or "")
        assert ends == ["cancelled"]

    @pytest.mark.asyncio
    async def test_an_async_handler_that_ignores_its_cancellation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handlers_module, "_CANCEL_SECONDS", 0.01)
        finish, finished = asyncio.Event(), asyncio.Event()

        async def handler(event: Event) -> None:
            while not finish.is_set():
                try:
                    await finish.wait()
                except asyncio.CancelledError:
                    continue
            finished.set()

        async with opened(handler, timeout=0.01, max_hung=1) as handlers:
            (outcome,) = await handlers.publish(Batch.of([make_event()]))
            assert "did not finish" in (outcome.error or "")
            assert handlers.hung == 1
            assert (await handlers.publish(Batch.of([make_event()])))[0].is_outage
            finish.set()
            await finished.wait()
            await asyncio.sleep(0)
            assert handlers.hung == 0

    @pytest.mark.asyncio
    async def test_a_hung_thread_is_replaced_until_too_many_hang(self, gate: threading.Event) -> None:
        # Only the slow function has little time: a new thread may take long to begin.
        async with opened(lambda event: None, concurrency=1, max_hung=2) as handlers:
            handlers.on("slow", timeout=0.01)(lambda event: (gate.wait(30), None)[1])
            for hung in (1, 2):
                (outcome,) = await handlers.publish(Batch.of([make_event(type="slow")]))
                assert outcome.result is Result.RETRY
                assert "did not finish within 0.01 s" in (outcome.error or "")
                assert handlers.hung == hung
                if hung == 1:
                    assert await handlers.publish(Batch.of([make_event()])) == [PUBLISHED]
            key = make_event().key
            first, second = await handlers.publish(Batch.of([make_event(key=key), make_event(key=key)]))
            assert first.is_outage
            assert "2 handlers hang" in (first.error or "")
            assert "restart the relay" in (first.error or "")
            assert second == UNTRIED
            gate.set()
            await handlers.close()
            join_handler_threads()
            assert handlers.hung == 0
            await handlers.open()
            assert await handlers.publish(Batch.of([make_event()])) == [PUBLISHED]


class TestPlainFunctionsInARow:
    @pytest.mark.asyncio
    async def test_the_way_to_a_thread_is_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hops = []
        submit = Thread.submit

        def counted(self: Thread, call: Callable[[], Any]) -> Any:
            hops.append(call)
            return submit(self, call)

        monkeypatch.setattr(Thread, "submit", counted)
        async with opened(lambda event: None, concurrency=4) as handlers:
            assert await handlers.publish(Batch.of([make_event() for _ in range(1000)])) == [PUBLISHED] * 1000
        assert len(hops) < 250

    @pytest.mark.asyncio
    async def test_each_has_a_context_of_its_own(self) -> None:
        variable = contextvars.ContextVar("variable", default="unset")
        seen = []

        def handler(event: Event) -> None:
            seen.append(variable.get())
            variable.set("of another event")

        async with opened(handler, concurrency=1) as handlers:
            await handlers.publish(Batch.of([make_event() for _ in range(3)]))
        assert seen == ["unset"] * 3

    @pytest.mark.asyncio
    async def test_so_has_each_async_one_though_they_share_a_task(self) -> None:
        variable = contextvars.ContextVar("variable", default="unset")
        seen, tasks = [], set()

        async def handler(event: Event) -> None:
            seen.append(variable.get())
            variable.set("of another event")
            await asyncio.sleep(0)
            assert variable.get() == "of another event"
            tasks.add(asyncio.current_task())

        async with opened(handler, concurrency=1) as handlers:
            assert await handlers.publish(Batch.of([make_event() for _ in range(3)])) == [PUBLISHED] * 3
        assert seen == ["unset"] * 3
        assert len(tasks) < 3

    @pytest.mark.asyncio
    async def test_one_that_hangs_is_left_behind_and_the_others_go_on(self, gate: threading.Event) -> None:
        def handler(event: Event) -> None:
            if event.type == "slow":
                gate.wait(30)

        types = ["quick", "slow", "quick", "quick"]
        keys = ["a", "b", "b", "c"]
        events = [make_event(key=key, type=type_) for key, type_ in zip(keys, types, strict=True)]
        # One time limit for all, so that one thread calls them in a row; far above what a quick one takes.
        async with opened(handler, concurrency=1, timeout=1) as handlers:
            outcomes = await handlers.publish(Batch.of(events))
            assert [outcome.result for outcome in outcomes] == ["published", "retry", "untried", "published"]
            assert handlers.hung == 1
            before = list(outcomes)
            gate.set()
        join_handler_threads()
        assert handlers.hung == 0
        assert list(outcomes) == before

    @pytest.mark.asyncio
    async def test_a_failure_holds_back_its_key_only(self) -> None:
        calls = []

        def handler(event: Event) -> None:
            calls.append(event.key)
            if event.type == "bad":
                raise ValueError

        named = [("a", "good"), ("a", "bad"), ("a", "good"), ("b", "good")]
        async with opened(handler, concurrency=1) as handlers:
            outcomes = await handlers.publish(Batch.of([make_event(key=key, type=type_) for key, type_ in named]))
        assert [outcome.result for outcome in outcomes] == ["published", "retry", "untried", "published"]
        assert calls == ["a", "a", "b"]

    @pytest.mark.asyncio
    async def test_each_has_the_time_of_its_own_function(self, gate: threading.Event) -> None:
        handlers = Handlers(concurrency=1, timeout=None)
        handlers.on("patient")(lambda event: None)
        handlers.on("hasty", timeout=0.05)(lambda event: (gate.wait(30), None)[1])
        await handlers.open()
        first, second = await handlers.publish(Batch.of([make_event(type="patient"), make_event(type="hasty")]))
        await handlers.close()
        assert first == PUBLISHED
        assert "did not finish within 0.05 s" in (second.error or "")


class TestClosing:
    @pytest.mark.asyncio
    async def test_waits_for_what_runs_and_starts_nothing_more(self) -> None:
        started, finish = asyncio.Event(), asyncio.Event()

        async def handler(event: Event) -> None:
            started.set()
            await finish.wait()

        async with opened(handler, concurrency=1) as handlers:
            call = asyncio.create_task(handlers.publish(Batch.of([make_event(), make_event(), make_event(key=None)])))
            await started.wait()
            other = asyncio.create_task(handlers.publish(Batch.of([make_event()])))
            await asyncio.sleep(0)
            closing = asyncio.create_task(handlers.close())
            await asyncio.sleep(0)
            finish.set()
            await closing
            assert await call == [PUBLISHED, UNTRIED, UNTRIED]
            assert await other == [UNTRIED]

    @pytest.mark.asyncio
    async def test_cancels_async_handlers_after_the_grace(self) -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(event: Event) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with opened(handler, grace=0) as handlers:
            call = asyncio.create_task(handlers.publish(Batch.of([make_event()])))
            await started.wait()
            await handlers.close()
            assert cancelled.is_set()
            assert await call == [UNTRIED]

    @pytest.mark.asyncio
    async def test_leaves_plain_handlers_behind_after_the_grace(self, gate: threading.Event) -> None:
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def handler(event: Event) -> None:
            loop.call_soon_threadsafe(started.set)
            gate.wait(30)

        async with opened(handler, grace=0) as handlers:
            call = asyncio.create_task(handlers.publish(Batch.of([make_event()])))
            await started.wait()
            await handlers.close()
            assert await call == [UNTRIED]
            assert handlers.hung == 1

    def test_a_hung_handler_does_not_keep_the_process_alive(self) -> None:
        program = """
import asyncio, threading
from pillarbox.batch import Batch
from pillarbox.conformance.events import make_event
from pillarbox.publishers.handlers import Handlers
async def main():
    handlers = Handlers(timeout=0.01)
    handlers.on("*")(lambda event: threading.Event().wait())
    await handlers.open()
    print((await handlers.publish(Batch.of([make_event()])))[0].result)
    await handlers.close()
asyncio.run(main())
"""
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
        assert ended.stdout.strip() == b"retry"

    @pytest.mark.asyncio
    @pytest.mark.parametrize("batch", [1, 3])
    async def test_cancelling_publish_cancels_its_handlers(self, batch: int) -> None:
        started, ends = asyncio.Barrier(batch + 1), []
        events = [make_event() for _ in range(batch)]

        async def handler(event: Event) -> None:
            await started.wait()
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(event)

        async with opened(handler) as handlers:
            call = asyncio.create_task(handlers.publish(Batch.of(events)))
            await started.wait()
            call.cancel()
            await asyncio.wait({call})
            assert call.cancelled()
            assert len(ends) == batch

    @pytest.mark.asyncio
    async def test_open_twice_keeps_what_runs(self) -> None:
        async with opened(as_async(lambda event: None)) as handlers:
            await handlers.open()
            assert await handlers.publish(Batch.of([make_event()])) == [PUBLISHED]
