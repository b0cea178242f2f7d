"""argparse with errors of one sentence."""

import argparse
import sys
from typing import Any, Final, NoReturn

from pillarbox.cli import secrets
from pillarbox.cli.settings import STORE, add_flags
from pillarbox.hints import hint

# The settings that every command with a store has as flags. The last one: behind a pooler no other command would work.
SHARED: Final = ("store", "prefix", "schema", "statement_cache")

EXIT_CODES = """exit codes:
  0    done
  1    failed: the database cannot be reached or refuses, or a check of `status` or `doctor` did not pass
  2    wrong arguments or settings
  3    not found
  130  ended by Ctrl-C
  141  the reader of the output has gone"""


class Parser(argparse.ArgumentParser):
    """Long options must be written out, so that a new option cannot change the meaning of a script."""

    def __init__(self, *names: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*names, **options)

    def error(self, message: str) -> NoReturn:
        message = secrets.masked(message)
        see = " See" if message.endswith("?") else "; see"
        print(f"pillarbox: {message}{see} `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here, where the options of this command are known for a hint."""
        chosen, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            if name.startswith("-") and name != "-":
                meant = hint(name, [each for each in self._option_string_actions if each.startswith("--")], " ").strip()
                self.error(f"`{self.prog}` has no option {name}{'; ' if meant else ''}{meant}")
            self.error(f"`{self.prog}` takes no argument {name!r}")
        return chosen, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes a value that is -- for the end of the options, and drops it.
        if action.nargs is None and "--" in arg_strings:
            (text,) = [each for each in arg_strings if each != "--"] or ["--"]
            value = self._get_value(action, text)
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = None if action.choices is None else [str(choice) for choice in action.choices]
        if choices is not None and value not in choices:
            what = "command" if isinstance(action, argparse._SubParsersAction) else str(action.metavar or action.dest)
            raise argparse.ArgumentError(None, f"there is no {what} {value!r}; {hint(value, choices)}")


def commands(parser: argparse.ArgumentParser, title: str = "commands") -> Any:
    """The group in which the commands of this parser are registered."""
    return parser.add_subparsers(title=title, metavar="COMMAND", required=True, parser_class=Parser)


def command(group: Any, name: str, run: Any, text: str, *, json: bool = True, store: bool = True) -> Any:
    """Register a command with the options that all commands have.

    run: a function from the arguments to the exit code; it may be async.
    """
    parser = group.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    if store:
        parser.add_argument("--config", metavar="FILE", help="a TOML file with settings (pillarbox.toml, if it exists)")
        add_flags(parser, (STORE,), lambda setting: setting.name in SHARED)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser
