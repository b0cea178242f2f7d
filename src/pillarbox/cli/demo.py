"""``pillarbox demo``."""

from typing import Any

from pillarbox.demo import story
from pillarbox.durations import seconds_of


def add(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="see it work on SQLite: a shop, a killed relay, and the proof")
    parser.add_argument("--duration", default="8s", metavar="DURATION", help="how long the shop takes orders (8s)")
    parser.add_argument("--json", action="store_true", help="print only the proof, as one JSON document")
    parser.set_defaults(run=run)


def run(chosen: Any) -> int:
    return story.run(seconds_of("--duration", chosen.duration, "1ms", "1h"), is_json=chosen.json)
