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
from proof.worker import POINTS

_CARD = Path("build/run-card.json")


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    return judge(asked.folder, asked.card) if asked.command == "check" else run(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proof", description="Prove it, or show what is wrong.")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="judge a history: 0 if it passes, 1 if not, 2 if it is none")
    checking.add_argument("folder", type=Path, help="where a run left its files")
    running = commands.add_parser("run", help="make a history and judge it: 0 if it passes")
    running.add_argument("--store", choices=NAMES, default="postgres", help="default postgres")
    running.add_argument("--broker", choices=("kafka", "handlers"), default="kafka", help="default kafka")
    running.add_argument("--seconds", type=float, default=60.0, help="of load; default 60")
    running.add_argument("--seed", type=int, help="default: another one each time; it is printed")
    running.add_argument("--workers", type=int, default=3, metavar="N", help="relays; default 3")
    running.add_argument("--faults", choices=("all", "none", "term"), default="all", help="default all")
    only = (
        f"one kind of fault, such as kill, stop, clock, operator, kill_at_point:POINT with one of {', '.join(POINTS)}"
    )
    running.add_argument("--only", metavar="KIND", help=only)
    running.add_argument("--on-dead", choices=("skip", "block", "park"), default="skip", help="default skip")
    running.add_argument("--planted", choices=PLANTED, metavar="NAME", help="switch a bug on, which must be found")
    running.add_argument("--keep", type=Path, metavar="FOLDER", help="where to keep the history; else only if it fails")
    for command in (checking, running):
        command.add_argument("--card", type=Path, default=_CARD, metavar="FILE", help=f"default {_CARD}")
    return parser


def run(asked: argparse.Namespace) -> int:
    from proof.runner import Plan, perform  # the checker alone needs neither servers nor drivers

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
        print(f"{folder} holds something already; give --keep a new folder", file=sys.stderr)
        return 2
    perform(plan, folder, tell)
    result = judge(folder, asked.card)
    if asked.keep or result:
        print(f"the history is in {folder}; judge it again with: python -m proof check {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return result


def judge(folder: Path, file: Path = _CARD) -> int:
    """Print the card of a history and what is wrong with it; the exit code."""
    gc.disable()  # millions of small records without cycles: looking for garbage among them takes longer than the check
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
    # As Ctrl-C, also where a shell in the background had it ignored: so that nothing is left behind.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; all that was started is closed")
