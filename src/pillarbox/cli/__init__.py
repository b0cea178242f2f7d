"""The command line: ``pillarbox``."""

import argparse
import sys
from collections.abc import Sequence

from pillarbox import __version__
from pillarbox.cli import demo
from pillarbox.errors import PillarboxError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0 done, 1 it failed, 2 it was called wrongly."""
    parser = argparse.ArgumentParser("pillarbox", description="A transactional outbox: its commands.")
    parser.add_argument("--version", action="version", version=f"pillarbox {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo.add(commands)
    chosen = parser.parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
        return code
    except PillarboxError as error:
        print(f"pillarbox: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; say nothing more, not even while the interpreter ends.
        sys.stdout = None
        return 141
