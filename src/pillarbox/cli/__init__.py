"""The command line: ``pillarbox``."""

import errno
import sys
import traceback
from collections.abc import Sequence
from inspect import iscoroutine
from typing import Any

from pillarbox import __version__
from pillarbox.cli import (
    audit,
    bench,
    completion,
    consume,
    consumers,
    dead,
    debezium,
    demo,
    doctor,
    events,
    identity,
    logs,
    maintenance,
    output,
    reconcile,
    relay,
    schema,
    secrets,
    session,
    status,
)
from pillarbox.cli.parser import EXIT_CODES, Parser, commands
from pillarbox.cli.settings import Document, is_text
from pillarbox.errors import ConfigError, DuplicateEvent, InvalidEvent, PillarboxError
from pillarbox.operations import NotFound, SeveralStreams

_SETTINGS = """settings:
  as flags, as variables PILLARBOX_STORE, PILLARBOX_TO, ..., and in pillarbox.toml (or --config FILE, PILLARBOX_CONFIG);
  a flag overrides a variable, and a variable overrides the file

"""


def build(prog: str = "pillarbox") -> Parser:
    """The parser of all commands. prog: the words that start it."""
    parser = Parser(
        prog,
        description="A transactional outbox: make its tables, run its relay and its consumers, operate it.",
        epilog=_SETTINGS + EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"pillarbox {__version__}")
    group = commands(parser)
    demo.add(group)
    schema.add(group)
    relay.add(group)
    consume.add(group)
    status.add(group)
    consumers.add(group)
    doctor.add(group)
    identity.add(group)
    events.add(group)
    dead.add(group)
    maintenance.add(group)
    reconcile.add(group)
    debezium.add(group)
    audit.add(group)
    bench.add(group)
    completion.add(group, build)
    return parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "pillarbox", document: Document | None = None) -> int:
    """Run a command and return its exit code; ``pillarbox --help`` explains the codes.

    document: settings that take the place of the file, unless the command or the environment names one.
    """
    output.prepare()
    try:
        parser = build(prog)
        words = sys.argv[1:] if arguments is None else list(arguments)
        first = words[0].partition("=")[0] if words else ""
        if first.startswith("--") and first not in ("--help", "--version"):
            parser.error(f"options come after the command, as in `{prog} status {first} ...`")
        chosen = parser.parse_args(words)
        chosen.document = document
        _refuse_invalid_text(chosen)
        logs.start("text", "warning")
        code = chosen.run(chosen)
        if iscoroutine(code):
            code = session.run(code)
        # Flush before the interpreter ends, so that a reader that has gone is noticed here.
        output.flush()
        return int(code)
    except PillarboxError as error:
        print(f"pillarbox: {secrets.masked(str(error))}", file=sys.stderr)
        if isinstance(error, NotFound):
            return 3
        return 2 if isinstance(error, ConfigError | InvalidEvent | DuplicateEvent | SeveralStreams) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        output.drop()
        return 141
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            output.drop()
            print(f"pillarbox: the output cannot be written ({error.strerror}); free some space", file=sys.stderr)
            return 1
        print(secrets.masked(traceback.format_exc()), end="", file=sys.stderr)
        print("pillarbox: unexpected error; please report it with the lines above", file=sys.stderr)
        return 1


def _refuse_invalid_text(chosen: Any) -> None:
    for name, value in vars(chosen).items():
        # A payload and a path may be any bytes.
        if name in ("payload", "config"):
            continue
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not is_text(text):
                option = name.removeprefix("set_").replace("_", "-")
                raise ConfigError(f"{option} is {text!r}, which is not UTF-8 text; correct it, or the locale")
