"""``manage.py pillarbox``: the command line of Pillarbox, on the store of this project."""

import sys
from argparse import REMAINDER
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError

from pillarbox.cli import main
from pillarbox.cli.settings import Document
from pillarbox.django.configuration import configuration
from pillarbox.errors import ConfigError

_DJANGOS: Final = ("--settings", "--pythonpath")


class Command(BaseCommand):
    help = "The commands of Pillarbox, with the setting PILLARBOX: relay, status, events, dead, doctor, ..."
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        # Its own parser: the words after `pillarbox` are those of its command line.
        raise SystemExit(_run(_without_djangos(argv[2:]), f"{Path(argv[0]).name} {argv[1]}"))

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("words", nargs=REMAINDER, help="a command of pillarbox, with its arguments")

    def handle(self, *arguments: Any, **options: Any) -> None:
        """For call_command."""
        code = _run(options["words"], "pillarbox")
        if code:
            raise CommandError(f"pillarbox ended with exit code {code}", returncode=code)


def _without_djangos(words: Sequence[str]) -> Sequence[str]:
    """Without the options that Django itself has read before it asks for a command."""
    kept, rest = [], iter(words)
    for word in rest:
        name, is_given, _ = word.partition("=")
        if name not in _DJANGOS:
            kept.append(word)
        elif not is_given:
            next(rest, None)
    return kept


def _run(words: Sequence[str], prog: str) -> int:
    document: Document | None = None
    try:
        document = configuration().document()
    except ConfigError as error:
        # The command may have a store of its own, or only print its help.
        if not {"--help", "-h", "--store", "--config"} & {word.partition("=")[0] for word in words} and words:
            print(f"pillarbox: {error}", file=sys.stderr)
            return 2
    return main(words, prog=prog, document=document)
