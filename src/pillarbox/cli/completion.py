"""``pillarbox completion``: prints a script that makes a shell complete commands and options."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from pillarbox.cli.parser import Parser, command
from pillarbox.errors import ConfigError, MissingExtra

_SHELLS: Final = ("bash", "zsh", "fish", "tcsh")


def add(group: Any, build: Callable[[], Parser]) -> None:
    """Register the command."""
    parser = command(
        group, "completion", partial(run, build), "print the completion script of a shell", json=False, store=False
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))


def run(build: Callable[[], Parser], chosen: Any) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise MissingExtra("`pillarbox completion`", "completion") from error
    if chosen.shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigError(f"this release of shtab does not know {chosen.shell}; install a newer one")
    print(shtab.complete(build(), shell=chosen.shell))
    return 0
