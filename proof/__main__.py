"""`python -m proof run --store postgres --broker kafka`, `python -m proof consumers --store postgres` and
`python -m proof check FOLDER`"""

import argparse
import gc
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from proof import card
from proof.checker import check
from proof.consumers import card as consumers_card
from proof.consumers import checker as consumers_checker
from proof.consumers import history as consumers_history
from proof.databases import NAMES
from proof.history import History
from proof.planted import PLANTED
from proof.tracer import EXACTLY_ONCE_POINTS, POINTS

BROKERS = ("kafka", "pulsar", "rabbitmq", "http", "handlers")
_SET = "kafka-set"
_WITHOUT_CONSUMERS = (_SET, "nats", "redis")
_CARD = Path("build/run-card.json")


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    if asked.command == "check":
        return check_folder(asked.folder, asked.card)
    return run_consumers(asked) if asked.command == "consumers" else run(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m proof", description="Break everything around the relay and check what it promises."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="check a history; exit code: 0 passed, 1 failed, 2 no history")
    checking.add_argument("folder", type=Path, help="the folder with the files of a run")
    running = commands.add_parser("run", help="make a history and check it; exit code: 0 passed")
    running.add_argument("--store", choices=NAMES, default="postgres", help="default postgres")
    running.add_argument("--broker", choices=(*BROKERS, *_WITHOUT_CONSUMERS), default="kafka", help="default kafka")
    running.add_argument("--seconds", type=float, default=60.0, help="how long events are written; default 60")
    running.add_argument("--seed", type=int, help="default: a random one, which is printed")
    running.add_argument(
        "--kills",
        type=int,
        default=0,
        metavar="N",
        help="go on, for a minute at most, until so many relays were killed and each fault of the broker has happened",
    )
    running.add_argument("--workers", type=int, default=3, metavar="N", help="relays; default 3")
    running.add_argument("--faults", choices=("all", "none", "term"), default="all", help="default all")
    only = (
        f"one kind of fault, such as kill, stop, clock, operator, kill_at_point:POINT with one of {', '.join(POINTS)}"
        f"; with exactly-once also {', '.join(EXACTLY_ONCE_POINTS)}"
    )
    running.add_argument("--only", metavar="KIND", help=only)
    running.add_argument(
        "--delivery",
        choices=("at-least-once", "exactly-once"),
        default="at-least-once",
        help="default at-least-once; exactly-once goes with kafka, and no fault may then make a copy",
    )
    running.add_argument("--on-dead", choices=("skip", "block", "park"), default="skip", help="default skip")
    running.add_argument("--planted", choices=PLANTED, metavar="NAME", help="switch on a bug that the check must find")
    running.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the history there; default: only if it fails"
    )
    consuming = commands.add_parser("consumers", help="the same for consumers; exit code: 0 passed")
    consuming.add_argument("--store", choices=("postgres", "mongo"), default="postgres", help="default postgres")
    consuming.add_argument("--broker", choices=BROKERS[:-2], default="kafka", help="default kafka")
    consuming.add_argument("--seconds", type=float, default=60.0, help="how long messages are written; default 60")
    consuming.add_argument("--seed", type=int, help="default: a random one, which is printed")
    consuming.add_argument(
        "--kills", type=int, default=0, metavar="N", help="go on until so many consumers were killed"
    )
    consuming.add_argument("--only", metavar="KINDS", help="some kinds of faults, such as kill,stop,broker,database")
    consuming.add_argument("--rate", type=float, default=60.0, metavar="N", help="messages a second; default 60")
    consuming.add_argument("--protocol", choices=("classic", "consumer"), default="classic", help="default classic")
    consuming.add_argument("--planted", metavar="NAME", help="switch on a bug that the check must find")
    consuming.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the history there")
    for command in (checking, running, consuming):
        command.add_argument("--card", type=Path, default=_CARD, metavar="FILE", help=f"default {_CARD}")
    return parser


def run(asked: argparse.Namespace) -> int:
    from proof.runner import EXACTLY_ONCE_LEASE, Plan, perform  # `check` needs neither servers nor drivers

    seed = random.SystemRandom().randrange(1_000_000) if asked.seed is None else asked.seed
    plan = Plan(
        store=asked.store,
        broker=asked.broker,
        seconds=asked.seconds,
        seed=seed,
        workers=asked.workers,
        least_kills=asked.kills,
        faults=asked.faults,
        only=asked.only,
        on_dead=asked.on_dead,
        planted=asked.planted,
        delivery=asked.delivery,
    )
    if plan.delivery == "exactly-once":
        if plan.broker not in ("kafka", _SET):
            print(f"--delivery exactly-once needs --broker kafka or {_SET}, not {plan.broker}", file=sys.stderr)
            return 2
        plan.lease_seconds = EXACTLY_ONCE_LEASE
    return _perform(asked, seed, lambda folder, tell: perform(plan, folder, tell))


def run_consumers(asked: argparse.Namespace) -> int:
    from proof.consumers.planted import PLANTED as BUGS
    from proof.consumers.runner import Plan, perform

    if asked.planted not in (None, *BUGS):
        print(f"there is no planted bug {asked.planted!r}; use one of: {', '.join(BUGS)}", file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(1_000_000) if asked.seed is None else asked.seed
    plan = Plan(
        store=asked.store,
        broker=asked.broker,
        seconds=asked.seconds,
        seed=seed,
        per_second=asked.rate,
        only=asked.only,
        protocol=asked.protocol,
        least_kills=asked.kills,
        planted=asked.planted,
    )
    return _perform(asked, seed, lambda folder, tell: perform(plan, folder, tell))


def _perform(asked: argparse.Namespace, seed: int, perform: Callable[[Path, Callable[[str], None]], object]) -> int:
    """Make a history, check it, and keep it if it was asked for or has a violation."""
    print(f"seed {seed}", flush=True)
    begun = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {line}", file=sys.stderr, flush=True)

    folder = asked.keep or Path(tempfile.mkdtemp(prefix="pillarbox-proof-"))
    if any(folder.glob("*")):
        print(f"{folder} is not empty; give --keep a new folder", file=sys.stderr)
        return 2
    perform(folder, tell)
    result = check_folder(folder, asked.card)
    if asked.keep or result:
        print(f"the history is in {folder}; check it again with: python -m proof check {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return result


def check_folder(folder: Path, file: Path = _CARD) -> int:
    """Print the card of a history and its violations. Returns the exit code."""
    gc.disable()  # it would take longer than the check: there are millions of records and no cycles
    try:
        if consumers_history.is_history(folder):
            found = consumers_card.card(consumers_checker.check(consumers_history.History.read(folder)))
            return _print(found, consumers_card.text(found), file)
        history = History.read(folder)
    except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
        print(f"{folder} holds no history: {error}", file=sys.stderr)
        return 2
    found = card.card(check(history))
    return _print(found, card.text(found), file)


def _print(found: dict[str, Any], text: str, file: Path) -> int:
    print(text)
    if found["violations"]:
        print(f"\n{card.violations(found)}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["verdict"] == "pass" else 1


if __name__ == "__main__":
    # Both end the run like Ctrl-C and close everything, also where a shell started it with Ctrl-C ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; everything is closed")
