"""`python -m proof check FOLDER`"""

import argparse
import gc
import json
import sys
from pathlib import Path

import msgspec

from proof import card
from proof.checker import check
from proof.history import History

_CARD = Path("build/run-card.json")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof", description="Prove it, or show what is wrong.")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="judge a history: 0 if it passes, 1 if not, 2 if it is none")
    checking.add_argument("folder", type=Path, help="where a run left its files")
    checking.add_argument("--card", type=Path, default=_CARD, metavar="FILE", help=f"default {_CARD}")
    asked = parser.parse_args(arguments)
    return judge(asked.folder, asked.card)


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
    sys.exit(main())
