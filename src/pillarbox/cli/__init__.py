"""The command line: ``pillarbox``."""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from pillarbox import __version__
from pillarbox.cli import (
    audit,
    bench,
    completion,
    dead,
    demo,
    events,
    logs,
    maintenance,
    output,
    reconcile,
    relay,
    schema,
    secrets,
    status,
)
from pillarbox.cli.hints import NotFound
from pillarbox.cli.parser import EXIT_CODES, Parser, commands
from pillarbox.cli.settings import is_text
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
    reconcile.add(group)
    audit.add(group)
    bench.add(group)
    completion.add(group, build)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code, as ``pillarbox --help`` explains it."""
    output.prepare()
    try:
        parser = build()
        words = sys.argv[1:] if arguments is None else list(arguments)
        first = words[0].partition("=")[0] if words else ""
        if first.startswith("--") and first not in ("--help", "--version"):
            parser.error(f"options come after the command, as in `pillarbox status {first} ...`")
        chosen = parser.parse_args(words)
        _refuse_what_is_no_text(chosen)
        logs.start("text", "warning")
        code: int = chosen.run(chosen)
        # Here, and not when the interpreter ends: a reader that has gone is met now.
        output.flush()
        return code
    except PillarboxError as error:
        print(f"pillarbox: {secrets.masked(str(error))}", file=sys.stderr)
        if isinstance(error, NotFound):
            return 3
        return 2 if isinstance(error, ConfigError | InvalidEvent | DuplicateEvent) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _write_no_more()
        return 141
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _write_no_more()
            print(f"pillarbox: the output cannot be written ({error.strerror}); free some space", file=sys.stderr)
            return 1
        print(secrets.masked(traceback.format_exc()), end="", file=sys.stderr)
        print("pillarbox: this was not foreseen; please report it with the lines above", file=sys.stderr)
        return 1


def _refuse_what_is_no_text(chosen: Any) -> None:
    for name, value in vars(chosen).items():
        # A payload is bytes, and so is a path.
        if name in ("payload", "config"):
            continue
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not is_text(text):
                option = name.removeprefix("set_").replace("_", "-")
                raise ConfigError(f"{option} is {text!r}, which is not UTF-8 text; correct it, or the locale")


def _write_no_more() -> None:
    """Not even what is left in the buffer when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
