"""`python -m proof run --store postgres --broker kafka` and `python -m proof check FOLDER`"""

import argparse
import gc
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from proof import card
from proof.checker import check
from proof.databases import NAMES
from proof.history import History
from proof.planted import PLANTED
from proof.tracer import POINTS

_CARD = Path("build/run-card.json")


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    return check_folder(asked.folder, asked.card) if asked.command == "check" else run(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m proof", description="Break everything around the relay and check what it promises."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="check a history; exit code: 0 passed, 1 failed, 2 no history")
    checking.add_argument("folder", type=Path, help="the folder with the files of a run")
    running = commands.add_parser("run", help="make a history and check it; exit code: 0 passed")
    running.add_argument("--store", choices=NAMES, default="postgres", help="default postgres")
    running.add_argument("--broker", choices=("kafka", "handlers"), default="kafka", help="default kafka")
    running.add_argument("--seconds", type=float, default=60.0, help="how long events are written; default 60")
    running.add_argument("--seed", type=int, help="default: a random one, which is printed")
    running.add_argument("--workers", type=int, default=3, metavar="N", help="relays; default 3")
    running.add_argument("--faults", choices=("all", "none", "term"), default="all", help="default all")
    only = (
        f"one kind of fault, such as kill, stop, clock, operator, kill_at_point:POINT with one of {', '.join(POINTS)}"
    )
    running.add_argument("--only", metavar="KIND", help=only)
    running.add_argument("--on-dead", choices=("skip", "block", "park"), default="skip", help="default skip")
    running.add_argument("--planted", choices=PLANTED, metavar="NAME", help="switch on a bug that the check must find")
    running.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the history there; default: only if it fails"
    )
    for command in (checking, running):
        command.add_argument("--card", type=Path, default=_CARD, metavar="FILE", help=f"default {_CARD}")
    return parser


def run(asked: argparse.Namespace) -> int:
    from proof.runner import Plan, perform  # `check` needs neither servers nor drivers

    seed = random.SystemRandom().randrange(1_000_000) if asked.seed is None else asked.seed
    plan = Plan(
        store=asked.store,
        broker=asked.broker,
        seconds=asked.seconds,
        seed=seed,
        workers=asked.workers,
        faults=asked.faults,
        only=asked.only,
        on_dead=asked.on_dead,
        planted=asked.planted,
    )
    print(f"seed {seed}", flush=True)
    begun = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {line}", file=sys.stderr, flush=True)

    folder = asked.keep or Path(tempfile.mkdtemp(prefix="pillarbox-proof-"))
    if any(folder.glob("*")):
        print(f"{folder} is not empty; give --keep a new folder", file=sys.stderr)
        return 2
    perform(plan, folder, tell)
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
        history = History.read(folder)
    except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
        print(f"{folder} holds no history: {error}", file=sys.stderr)
        return 2
    found = card.card(check(history))
    print(card.text(found))
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
