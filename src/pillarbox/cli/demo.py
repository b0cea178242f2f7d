"""``pillarbox demo``."""

import argparse
from typing import Any, Final

from pillarbox.demo.story import run

_LONGEST_SECONDS: Final = 3600.0


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="see it work on SQLite: a shop, a killed relay, and the proof")
    parser.add_argument("--seconds", type=_seconds, default=8.0, help="how long the shop takes orders (default 8)")
    parser.add_argument("--json", action="store_true", help="print only the proof, as one JSON document")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r}; give more than 0 and at most {_LONGEST_SECONDS:.0f} seconds")
    return seconds
