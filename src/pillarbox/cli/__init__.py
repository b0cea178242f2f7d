"""The command line: ``pillarbox``."""

import os
import sys
import traceback
from collections.abc import Sequence

from pillarbox import __version__
from pillarbox.cli import audit, completion, dead, demo, events, logs, maintenance, relay, schema, secrets, status
from pillarbox.cli.hints import NotFound
from pillarbox.cli.parser import EXIT_CODES, Parser, commands
from pillarbox.errors import ConfigError, DuplicateEvent, InvalidEvent, PillarboxError

_SETTINGS = """settings:
  as flags, as variables PILLARBOX_STORE, PILLARBOX_TO, ..., and in pillarbox.toml (or --config FILE, PILLARBOX_CONFIG);
  a flag counts more than a variable, and that more than the file

"""


def build() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        "pillarbox",
        description="A transactional outbox: its tables, its relay, its operators.",
        epilog=_SETTINGS + EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"pillarbox {__version__}")
    group = commands(parser)
    demo.add(group)
    schema.add(group)
    relay.add(group)
    status.add(group)
    events.add(group)
    dead.add(group)
    maintenance.add(group)
    audit.add(group)
    completion.add(group, build)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code, as ``pillarbox --help`` explains it."""
    try:
        parser = build()
        words = sys.argv[1:] if arguments is None else list(arguments)
        first = words[0].partition("=")[0] if words else ""
        if first.startswith("--") and first not in ("--help", "--version"):
            parser.error(f"options come after the command, as in `pillarbox status {first} ...`")
        chosen = parser.parse_args(words)
        logs.start("text", "warning")
        code: int = chosen.run(chosen)
        # Here, and not when the interpreter ends: a reader that has gone is met now.
        sys.stdout.flush()
        return code
    except PillarboxError as error:
        print(f"pillarbox: {secrets.masked(str(error))}", file=sys.stderr)
        if isinstance(error, NotFound):
            return 3
        return 2 if isinstance(error, ConfigError | InvalidEvent | DuplicateEvent) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nothing more is written, not even while the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception:
        print(secrets.masked(traceback.format_exc()), end="", file=sys.stderr)
        print("pillarbox: this was not foreseen; please report it with the lines above", file=sys.stderr)
        return 1
