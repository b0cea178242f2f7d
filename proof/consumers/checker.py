"""Checks a history of consumers. Linear in its length, no I/O."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from proof.consumers.history import History, Message
from proof.violation import Finding, Violation, collect

APPLIED = ("deliver", "flaky")  # the fates of events that have an effect
OTHER_THAN_ONE = "its effect is not there exactly once"
SKIPPED = "it was skipped: neither applied nor dead"


@dataclass(slots=True)
class Report:
    """The violations of a history; without any it passes."""

    history: History
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return not self.findings

    def count(self, invariant: str, sentence: str | None = None) -> int:
        return sum(
            each.count for each in self.findings if each.invariant == invariant and sentence in (None, each.sentence)
        )

    def kills(self) -> int:
        return sum(fault.kind == "kill" for fault in self.history.faults)


def check(history: History) -> Report:
    events = {message.event_id: message for message in history.messages}
    found = [
        *_evidence(history),
        *_skipped(history, events),
        *_effects(history, events),
        *_order(history),
        *_dead(history, events),
        *_inbox(history, events),
        *_end(history),
    ]
    return Report(history, collect(found))


def _evidence(history: History) -> Iterator[Violation]:
    """A run in which nothing happened proves nothing."""
    fates = Counter(message.fate for message in history.messages)
    for fate in (*APPLIED, "reject", "other"):
        if not fates[fate]:
            yield Violation("evidence", "there was no event of this fate", fate)
    if len(fates) and len(history.messages) == len({message.event_id for message in history.messages}):
        yield Violation("evidence", "the broker had no copy of any event", "messages")


def _skipped(history: History, events: dict[str, Message]) -> Iterator[Violation]:
    """I1: at rest every event is applied or dead. One without a handler is neither."""
    known = {effect.event_id for effect in history.effects} | {letter.event_id for letter in history.letters}
    for event_id, message in events.items():
        if message.fate != "other" and event_id not in known:
            yield Violation("I1", SKIPPED, event_id, f"{message.fate}, {message.partition}/{message.offset}")


def _effects(history: History, events: dict[str, Message]) -> Iterator[Violation]:
    """I12: the effect of an event is there once, however often it came; a dead event has none."""
    for event_id, count in Counter(effect.event_id for effect in history.effects).items():
        message = events.get(event_id)
        if message is None:
            yield Violation("I2", "an effect of an event that the broker does not have", event_id)
        elif count != 1 or message.fate not in APPLIED:
            yield Violation("I12", OTHER_THAN_ONE, event_id, f"{message.fate}, {count} effects")


def _order(history: History) -> Iterator[Violation]:
    """I5: the effects of a key are in the order of its events. A repeated effect counts once."""
    highest: dict[str, int] = {}
    seen: set[str] = set()
    for effect in history.effects:
        if effect.event_id in seen:
            continue
        seen.add(effect.event_id)
        last = highest.get(effect.key, 0)
        if effect.n <= last:
            what = f"{effect.event_id} (n {effect.n}) after n {last}"
            yield Violation("I5", "effects of a key are out of order", effect.key, what)
        highest[effect.key] = max(last, effect.n)


def _dead(history: History, events: dict[str, Message]) -> Iterator[Violation]:
    """I11: only what a handler rejects dies; an outage, a kill and a retry bury nothing."""
    for letter in history.letters:
        message = events.get(letter.event_id)
        if message is None:
            yield Violation("I2", "a dead letter of an event that the broker does not have", letter.event_id)
        elif message.fate != "reject":
            what = f"{message.fate}: {letter.error[:80]}"
            yield Violation("I11", "dead, although its handler does not reject it", letter.event_id, what)
        if letter.waits:
            yield Violation("I15", "a replay was never taken", letter.event_id)


def _inbox(history: History, events: dict[str, Message]) -> Iterator[Violation]:
    """I12: at rest the inbox has what was applied and what is dead, and nothing else.

    A replay makes its event new: while it waits, there is no row."""
    inbox = set(history.run.inbox)
    wanted = {effect.event_id: "applied" for effect in history.effects}
    wanted |= {letter.event_id: "dead" for letter in history.letters if not letter.waits}
    for event_id, state in wanted.items():
        if event_id not in inbox:
            yield Violation("I12", f"it is {state}, and the inbox has no row of it", event_id)
    for event_id in inbox - wanted.keys():
        if event_id in events:
            yield Violation("I12", "the inbox has a row of it, and it is neither applied nor dead", event_id)


def _end(history: History) -> Iterator[Violation]:
    """I15: after the last fault the consumers finish everything, and stop when they are asked to."""
    run = history.run
    if run.rested is None:
        for partition, count in run.unfinished.items():
            yield Violation("I15", "messages of a partition were never committed", partition, f"{count} messages")
    for name in run.late:
        yield Violation("I15", "a consumer did not stop", name)
    for name in run.broken:
        yield Violation("I15", "a consumer ended by itself", name)
