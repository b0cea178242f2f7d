"""``pillarbox reconcile`` on real databases, as a user runs it."""

import itertools
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.commands import Command

pytestmark = pytest.mark.timeout(120)
_numbers = itertools.count(1)
SHOP = """
import os
import time
from pillarbox import Check, Outbox, Relay, Stream, stable_id
from pillarbox.urls import store_from_url

outbox = Outbox()


def page(number, **fields):
    return outbox.event("page.saved", {"n": number}, key=number, **{"id": stable_id("page", number), **fields})


def missing():
    for number in range(1, 6):
        yield page(number)


async def nothing():
    return []


async def new_ids():
    yield page(7)
    yield page(8, id=None)


def broken():
    yield page(9)
    raise OSError("the wiki is away")


def hangs():
    print("hangs", flush=True)
    time.sleep(60)


def relay(*checks):
    store = store_from_url(os.environ["PILLARBOX_STORE"], prefix=os.environ["PILLARBOX_PREFIX"])
    return Relay(store, [Stream("default", to="stdout:")], checks=checks)


def good():
    return relay(Check("pages", missing), Check("none", nothing))


def bad():
    return relay(Check("new", new_ids), Check("broken", broken), Check("pages", missing))


def hanging():
    return relay(Check("hangs", hangs))
"""


@pytest.fixture(autouse=True)
def shop(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)


def row(check: str, *counts: int, more: bool = False, error: str | None = None) -> dict[str, object]:
    names = ("missing", "emitted", "waiting", "published", "dead")
    return {"check": check, **dict(zip(names, counts, strict=True)), "more": more, "error": error}


def test_what_is_missing_is_told_emitted_and_published(pillarbox: Command) -> None:
    dry = pillarbox("reconcile", "shop:good", "--dry-run", "--json")
    assert dry.json == [row("pages", 5, 0, 0, 0, 0), row("none", 0, 0, 0, 0, 0)]
    assert pillarbox("events", "list", "--json").json == []
    some = pillarbox("reconcile", "shop:good", "--check", "pages", "--limit", "2", "--json")
    assert some.json == [row("pages", 2, 2, 0, 0, 0, more=True)]
    table = pillarbox("reconcile", "shop:good")
    assert (table.code, table.err) == (0, "")
    assert [line.split() for line in table.out.splitlines()] == [
        ["check", "missing", "emitted", "waiting", "published", "dead", "more"],
        ["pages", "3", "3", "2", "0", "0", "-"],
        ["none", "0", "0", "0", "0", "0", "-"],
    ]
    drained = pillarbox("relay", "shop:good", "--drain")
    assert drained.out.count("page.saved") == 5
    assert pillarbox("reconcile", "shop:good", "--check", "pages", "--json").json == [row("pages", 0, 0, 0, 5, 0)]
    assert pillarbox("reconcile", "shop:good", "--check", "none").out == "nothing is missing\n"


def test_a_check_that_fails_leaves_the_others_alone(pillarbox: Command) -> None:
    ended = pillarbox("reconcile", "shop:bad")
    assert ended.code == 1
    new, broken = ended.err.splitlines()
    assert new.startswith("pillarbox: check 'new' yielded an event of type 'page.saved' with a new id")
    assert "id=stable_id(" in new
    line = SHOP[: SHOP.index("raise OSError")].count("\n") + 1
    assert broken == f"pillarbox: check 'broken' failed with OSError: the wiki is away (shop.py, line {line})"
    assert [line.split()[:3] for line in ended.out.splitlines()[1:]] == [
        ["new", "1", "1"],
        ["broken", "1", "1"],
        ["pages", "5", "5"],
    ]
    assert len(pillarbox("events", "list", "--json").json) == 7
    only = pillarbox("reconcile", "shop:bad", "--check", "broken", "--json")
    assert (only.code, '"waiting": 1' in only.out, '"error": "check' in only.out) == (1, True, True)


def test_missing_tables_name_the_remedy(bare: Command) -> None:
    bare("reconcile", "shop:good").failed(1, "`pillarbox init`")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["shop:good", "--check", "page"], 3, "shop:good has no check 'page'; it has: 'pages', 'none'"),
        (["shop:relay"], 2, "shop:relay has no checks; give it some: Relay(..., checks=[Check(...)])"),
        (["shop:godo"], 2, "did you mean 'good'?"),
        (["shop:good", "--limit", "0"], 2, "--limit is 0; use 1 or more"),
        (["shop:good", "--limit", "many"], 2, "--limit"),
        (["shop:good", "--dryrun"], 2, "did you mean '--dry-run'?"),
        ([], 2, "MODULE:ATTRIBUTE"),
    ],
)
def test_a_wrong_call_is_one_sentence(on_sqlite: Command, words: list[str], code: int, said: str) -> None:
    on_sqlite("reconcile", *words).failed(code, said)


def test_ctrl_c_ends_a_check_that_hangs(on_sqlite: Command) -> None:
    process = on_sqlite.start("reconcile", "shop:hanging")
    assert process.stdout is not None
    assert process.stdout.readline() == b"hangs\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"")


def test_a_hangup_that_is_ignored_ends_nothing(on_sqlite: Command) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = on_sqlite.start("reconcile", "shop:hanging")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None
    assert process.stdout.readline() == b"hangs\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_help_and_completion_know_it(on_sqlite: Command) -> None:
    assert "--dry-run" in on_sqlite("reconcile", "--help").out
    assert "reconcile" in on_sqlite("completion", "bash").out
