"""The checker of consumers finds each kind of violation in a history made by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from proof.consumers.card import card, text
from proof.consumers.checker import check
from proof.consumers.history import Applied, History, Letter, Message, Run, is_history, save
from proof.history import Fault, Log


def healthy() -> History:
    """Six events of two keys; one comes twice."""
    fates = [("a", "deliver"), ("b", "flaky"), ("c", "reject"), ("d", "other"), ("e", "deliver")]
    messages = [Message(name, "k", n, fate, 0, n) for n, (name, fate) in enumerate(fates, 1)]
    messages += [Message("f", "other key", 1, "deliver", 1, 0), messages[0]]
    effects = [Applied("a", "k", 1), Applied("b", "k", 2), Applied("f", "other key", 1), Applied("e", "k", 5)]
    run = Run(1, "postgres", 10.0, {"commit": "abc"}, 3, 12, healed=1.0, rested=2.0, inbox=["a", "b", "c", "e", "f"])
    return History(run, messages, effects, [Letter("c", 1, "always rejected", False)], [Fault(1.0, "kill", "c1")])


def test_a_healthy_history_passes() -> None:
    report = check(healthy())
    assert report.passed, report.findings
    shown = card(report)
    assert (shown["verdict"], shown["kills"], shown["skipped"], shown["seconds_after_healing"]) == ("pass", 1, 0, 1.0)
    assert "honest bound" in text(shown)


def skip(history: History) -> None:
    del history.effects[-1]
    history.run.inbox.remove("e")


def apply_twice(history: History) -> None:
    history.effects.append(history.effects[0])


def apply_the_dead(history: History) -> None:
    history.effects.append(Applied("c", "k", 6))


def apply_what_nobody_wrote(history: History) -> None:
    history.effects.append(Applied("x", "x", 1))
    history.run.inbox.append("x")


def overtake(history: History) -> None:
    history.effects[0], history.effects[1] = history.effects[1], history.effects[0]


def bury_by_mistake(history: History) -> None:
    history.letters.append(Letter("e", 5, "an outage", False))


def forget_the_replay(history: History) -> None:
    history.letters[0].waits = True


def bury_without_an_inbox_row(history: History) -> None:
    history.run.inbox.remove("c")


def leave_a_row(history: History) -> None:
    history.run.inbox.append("d")


def never_finish(history: History) -> None:
    history.run.rested, history.run.unfinished = None, {"3": 7}


def end_by_itself(history: History) -> None:
    history.run.broken = ["c2 (1)"]


def have_no_copies(history: History) -> None:
    del history.messages[-1]


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (skip, "I1"),
        (apply_twice, "I12"),
        (apply_the_dead, "I12"),
        (apply_what_nobody_wrote, "I2"),
        (overtake, "I5"),
        (bury_by_mistake, "I11"),
        (forget_the_replay, "I15"),
        (bury_without_an_inbox_row, "I12"),
        (leave_a_row, "I12"),
        (never_finish, "I15"),
        (end_by_itself, "I15"),
        (have_no_copies, "evidence"),
    ],
)
def test_a_violation_is_found(change: Callable[[History], None], invariant: str) -> None:
    history = healthy()
    change(history)
    report = check(history)
    assert invariant in {finding.invariant for finding in report.findings}
    assert card(report)["verdict"] == "fail"


def test_a_letter_that_waits_for_its_replay_has_no_inbox_row() -> None:
    history = healthy()
    forget_the_replay(history)
    bury_without_an_inbox_row(history)
    assert [finding.invariant for finding in check(history).findings] == ["I15"]


def test_a_history_comes_back_from_its_files(tmp_path: Path) -> None:
    history = healthy()
    assert not is_history(tmp_path)
    save(tmp_path, history.run)
    files: dict[str, Sequence[object]] = {"messages": history.messages, "effects": history.effects}
    for name, records in (files | {"letters": history.letters, "faults": history.faults}).items():
        log = Log(tmp_path / f"{name}.jsonl")
        for record in records:
            log.write(record)
        log.close()
    assert is_history(tmp_path)
    assert History.read(tmp_path) == history
