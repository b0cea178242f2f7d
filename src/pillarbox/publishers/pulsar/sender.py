"""Sends a batch to Pulsar in waves, so that every key keeps its order. Blocking."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

import pulsar

from pillarbox.envelopes import PulsarMessage
from pillarbox.event import Event
from pillarbox.publisher import PUBLISHED, UNTRIED, Outcome, Result
from pillarbox.publishers._link import Link
from pillarbox.publishers._waves import Call, Runs
from pillarbox.publishers.pulsar.outcomes import ACCESS_ERRORS, WAIT_SECONDS, Outcomes, is_ok, is_unreached, name_of
from pillarbox.publishers.pulsar.routes import Connection, Partitions, Route, Settings
from pillarbox.publishers.pulsar.wave import Vain, Wave
from pillarbox.pulsar.settings import Namespace

logger = logging.getLogger("pillarbox.publishers.pulsar")

TICK_SECONDS: Final = 0.1
QUIET_SECONDS: Final = 5.0
# Most messages in flight at a close are confirmed within this time, and then need no copy.
GRACE_SECONDS: Final = 1.0
# The client's own part of a message. Within so many bytes of the limit it sends what the broker refuses, and never
# reports it.
FRAME_BYTES: Final = 1024
# A batch has up to 1000 messages, and its headers do not count for the client's limit of a batch.
_HEADERS_SHARE: Final = 1280
# Questions about a topic that is not served take at most a tenth of the time.
_LONG_QUESTIONS: Final = 10
# A larger message is sent alone: the client then says at once whether the broker takes it. In batches of one key it
# ends the process when one of several batches is too big.
_LARGE_BYTES: Final = 65_536


class AwayError(Exception):
    """The topic cannot be asked about or connected to now. is_answered: a broker answers, but does not serve it.
    seconds: how long the question took."""

    def __init__(self, problem: str, *, is_answered: bool, seconds: float) -> None:
        super().__init__(problem)
        self.is_answered = is_answered
        self.seconds = seconds


class NoAccessError(Exception):
    """The cluster refuses this client."""


class Ending(Enum):
    """The end of the wait for a wave."""

    ANSWERED = auto()
    STOPPED = auto()
    STUCK = auto()
    REFUSED = auto()  # the topic takes nothing any more, as a new client is told
    BACK = auto()
    NO_ACCESS = auto()


class Target(NamedTuple):
    """The Pulsar topic for the events with one value of ``topic``: its route, or why it has none."""

    topic: str
    route: Route | None
    refusal: Outcome | None = None


class Sender:
    """One connection, used by one call at a time in its own thread."""

    def __init__(
        self,
        *,
        settings: Settings,
        namespace: Namespace,
        partitions: Partitions,
        link: Link,
        message_of: Callable[[Event], PulsarMessage],
        default_topic: str,
        stuck_seconds: float,
    ) -> None:
        self._connection = Connection(settings, partitions)
        self._namespace = namespace
        self._partitions = partitions
        self._link = link
        self._message_of = message_of
        self._default_topic = default_topic
        self._stuck_seconds = stuck_seconds
        self._max_bytes = settings.max_message_bytes - FRAME_BYTES
        self._outcomes = Outcomes(link.description, settings.max_message_bytes)
        # Topics that need someone to act: asked about again after a while.
        self._problems: dict[str, tuple[float, Target]] = {}
        self._vain = Vain()
        self.stop = threading.Event()

    def connect(self) -> Outcome | None:
        """Connect to the default topic now, not with the first event; returns why it cannot be written, if so. Raises
        AwayError and NoAccessError."""
        try:
            return self._target("").refusal
        except AwayError as error:
            if not error.is_answered:
                raise
            return self._outcomes.default_away(self._full_name(""), str(error))

    def close(self) -> None:
        self._connection.drop()

    def deliver(self, events: Sequence[Event]) -> list[Outcome]:
        """One outcome per event. Returns when all are known, or soon after ``stop`` is set."""
        try:
            targets = self._targets(events)
            return self._deliver(Call(events), targets) if targets else [UNTRIED] * len(events)
        except BaseException:
            self.close()
            raise

    def _deliver(self, call: Call, targets: Mapping[str, Target]) -> list[Outcome]:
        total = len(call.events)
        todo: Sequence[int] = range(total)
        while todo and not self.stop.is_set():
            wave, later = self._send(call, targets, todo)
            ending = self._wait(call, targets, wave)
            if ending is Ending.ANSWERED and len(wave.sent) == total and all(map(is_ok, wave.answers)):
                return [PUBLISHED] * total
            self._record(call, targets, wave, ending)
            todo = later
            if ending is not Ending.ANSWERED:
                self._connection.drop()
                break
        for index in todo:
            call.record(index, UNTRIED)
        return call.outcomes

    def _targets(self, events: Sequence[Event]) -> dict[str, Target]:
        """The targets by the events' ``topic``; empty when stopped before the cluster answered."""
        names = deque(sorted({event.topic for event in events}))
        found: dict[str, Target] = {}
        silent_since = time.monotonic()
        while not self.stop.is_set():
            away: dict[str, AwayError] = {}
            is_lost = False
            for name in names:
                if name in found:
                    continue
                try:
                    found[name] = self._target(name)
                except NoAccessError as error:
                    found[name] = Target(self._full_name(name), None, self._outcomes.no_access(str(error)))
                except AwayError as error:
                    away[name] = error
                    is_lost = is_lost or not error.is_answered
                    if is_lost and not any(target.route for target in found.values()):
                        break  # most likely nothing answers: do not ask about each topic
            if not away:
                return found
            seconds = time.monotonic() - silent_since
            others = any(target.route for target in found.values())
            for name, reason in away.items():
                if others or (reason.is_answered and seconds >= min(QUIET_SECONDS, self._stuck_seconds)):
                    found[name] = self._aside(name, reason, others=others)
            if is_lost:
                # The connection was dropped, and the producers of the others with it.
                found = {name: target for name, target in found.items() if target.route is None}
            if not others:
                if seconds >= QUIET_SECONDS:
                    self._link.silent(seconds, str(next(iter(away.values()))))
                self.stop.wait(TICK_SECONDS)
                names.rotate(-1)  # so that a topic that never answers does not hide the others
        return {}

    def _aside(self, name: str, reason: AwayError, *, others: bool) -> Target:
        """The target of a topic that cannot be used for now. others: another topic can."""
        topic = self._full_name(name)
        if name or others:
            refusal = self._outcomes.away(topic, str(reason), others=others)
            # The others wait for each question about it.
            return self._put_aside(name, refusal, max(WAIT_SECONDS, _LONG_QUESTIONS * reason.seconds))
        return Target(topic, None, self._outcomes.default_away(topic, str(reason)))

    def _full_name(self, name: str) -> str:
        return self._namespace.topic(name or self._default_topic)

    def _target(self, name: str) -> Target:
        """Raises AwayError and NoAccessError."""
        until, target = self._problems.get(name, (0.0, Target("", None)))
        if time.monotonic() < until:
            return target
        if not (name or self._default_topic):
            return self._put_aside(name, self._outcomes.no_topic())
        topic, begun = self._full_name(name), time.monotonic()
        try:
            return Target(topic, self._connection.route(topic))
        except pulsar.PulsarException as error:
            problem = name_of(error)
            self._partitions.forget(topic)
            if problem in ACCESS_ERRORS:
                self._connection.drop()
                raise NoAccessError(problem) from error
            if not self._outcomes.is_of_address(problem):
                # The client itself waits for the end of what it takes for passing, and then says Timeout.
                is_answered = self._connection.answered_at >= begun or not is_unreached(problem)
                if not is_answered:
                    self._connection.drop()
                raise AwayError(problem, is_answered=is_answered, seconds=time.monotonic() - begun) from error
            refusal = self._outcomes.address(problem, topic, own=bool(name))
            return self._put_aside(name, refusal) if name else Target(topic, None, refusal)

    def _put_aside(self, name: str, refusal: Outcome, seconds: float = WAIT_SECONDS) -> Target:
        if refusal.result is Result.RETRY:
            self._link.waits(name, refusal.error or "")
        target = Target(self._full_name(name) if name else "", None, refusal)
        self._problems[name] = time.monotonic() + seconds, target
        return target

    def _send(self, call: Call, targets: Mapping[str, Target], todo: Sequence[int]) -> tuple[Wave, list[int]]:
        """Send the events that may go now. Returns their wave, and the indexes of the next one."""
        wave, later = Wave(len(call.events)), list[int]()
        events, stops, answers, sent, message_of = call.events, call.stops, wave.answers, wave.sent, self._message_of
        runs, large_bytes = Runs(strict=False), min(_LARGE_BYTES, self._max_bytes // 4)
        light_bytes, heavy_bytes = self._max_bytes // _HEADERS_SHARE, self._max_bytes // 2
        # Unpacked once per change of topic.
        written_topic = events[todo[0]].topic
        topic, route, topic_refusal = targets[written_topic]
        for each in targets.values():
            if each.route is not None:
                each.route.turn()
        for index in todo:
            event = events[index]
            if event.topic != written_topic:
                written_topic = event.topic
                topic, route, topic_refusal = targets[written_topic]
            if stops and call.is_behind_a_stop(index):
                continue
            if heavy_bytes < 0:
                later.append(index)
                continue
            if route is None:
                if runs.must_wait(event.key, topic):
                    later.append(index)
                    continue
                call.record(index, topic_refusal or UNTRIED)
                continue
            try:
                key, value, properties, properties_bytes = message_of(event)
                size = len(value) + properties_bytes
            except Exception as error:
                call.record(index, self._outcomes.envelope(event, error))
                continue
            is_large = size > large_bytes
            if properties_bytes > light_bytes and not is_large:
                heavy_bytes -= properties_bytes
            # Two producers may confirm in any order: what follows with the other one waits until the first has.
            if runs.must_wait(key, topic + " alone" if is_large else topic):
                later.append(index)
                continue
            if size > self._max_bytes:
                call.record(index, self._outcomes.too_big(topic, size))
                continue
            sent.append(index)
            report = wave.reporter(index)
            try:
                producer = route.choose_lone(key) if is_large else route.choose(key)
                producer.send_async(value, report, properties, key)
            except pulsar.PulsarException as error:
                report(getattr(pulsar.Result, name_of(error), pulsar.Result.UnknownError), None)
            # The client reports at once what it refuses itself. Nothing of that key may follow.
            if answers[index] is not None and not is_ok(answers[index]):
                # One that is not large was refused with its batch.
                call.record(index, self._classified(event, topic, answers[index].name, 1 if is_large else 2))
        wave.expect_answers()
        return wave, later

    def _classified(self, event: Event, topic: str, name: str, sent: int = 1) -> Outcome:
        return self._outcomes.classify(name, topic, own=bool(event.topic), count=sent)

    def _wait(self, call: Call, targets: Mapping[str, Target], wave: Wave) -> Ending:
        """Return when every message has its answer. During an outage this waits for its end."""
        progress_at = time.monotonic()
        stop_at: float | None = None
        ask_at = 0.0
        answered = 0
        while not wave.wait(TICK_SECONDS):
            now = time.monotonic()
            if self.stop.is_set():
                stop_at = stop_at or now + GRACE_SECONDS
                if now >= stop_at:
                    return Ending.STOPPED
            if (seen := wave.answered()) > answered:
                answered, progress_at = seen, now
                self._link.confirmed()
                continue
            quiet_seconds = now - progress_at
            if quiet_seconds >= QUIET_SECONDS:
                self._link.silent(quiet_seconds, None)
            if quiet_seconds >= min(QUIET_SECONDS, self._stuck_seconds) and now >= ask_at:
                if (ending := self._look(call, targets, wave, quiet_seconds)) is not None:
                    return ending
                ask_at = time.monotonic() + QUIET_SECONDS
        self._link.confirmed()
        return Ending.ANSWERED

    def _look(self, call: Call, targets: Mapping[str, Target], wave: Wave, quiet_seconds: float) -> Ending | None:
        """Whether to give up the wait for a silent partition; None: wait on."""
        silent = next((index for index in wave.sent if wave.answers[index] is None), wave.sent[0])
        topic, route, _ = targets[call.events[silent].topic]
        is_connected = route is not None and route.choose(call.events[silent].key).is_connected()
        if is_connected and quiet_seconds < self._stuck_seconds:
            return None
        try:
            self._connection.ask(topic)
        except pulsar.PulsarException as error:
            if name_of(error) in ACCESS_ERRORS:
                return Ending.NO_ACCESS
            if not self._outcomes.is_of_address(name_of(error)):
                return None  # everything is away
            wave.refusal = topic, name_of(error)
            return Ending.REFUSED
        # After an outage the client waits up to a minute before it connects again: a new one does so now.
        return Ending.STUCK if is_connected else Ending.BACK

    @staticmethod
    def _place(event: Event, targets: Mapping[str, Target]) -> tuple[str, int]:
        topic, route, _ = targets[event.topic]
        return topic, -1 if route is None else route.partition(event.key)

    def _record(self, call: Call, targets: Mapping[str, Target], wave: Wave, ending: Ending) -> None:
        """Record the outcomes of a wave that was not confirmed as a whole."""
        # Answers may still come. Read twice, one could be missing at first, and then count as a refusal.
        answers = tuple(wave.answers)
        confirmed = {index for index in wave.sent if answers[index] is not None and is_ok(answers[index])}
        for index in confirmed:
            call.confirm(index)
        places = {index: self._place(call.events[index], targets) for index in wave.sent}
        silent = {places[index] for index in wave.sent if answers[index] is None} if ending is Ending.BACK else ()
        self._vain.note(silent, {places[index] for index in confirmed})
        for index in sorted(set(wave.sent) - confirmed):
            event, result = call.events[index], answers[index]
            topic = targets[event.topic].topic
            if result is not None:
                if call.outcomes[index] is UNTRIED:  # else it was recorded when it was sent
                    call.record(index, self._classified(event, topic, result.name, len(wave.sent)))
                    self._partitions.forget(topic)
            elif ending is Ending.STUCK:
                call.record(index, self._outcomes.stuck(topic, self._stuck_seconds, others=call.any_confirmed))
            elif ending is Ending.REFUSED and topic == wave.refusal[0]:
                call.record(index, self._classified(event, *wave.refusal))
            elif ending is Ending.NO_ACCESS:
                call.record(index, self._outcomes.no_access("AuthenticationError"))
            elif ending is Ending.BACK and self._vain.refuses(places[index]):
                call.record(index, self._outcomes.in_vain(topic, others=call.any_confirmed))
            else:
                call.record(index, UNTRIED)
