"""MariaDB from Debian's package."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import apt, process
from .cache import cached
from .mysqld import Mysqld, as_root


class MariaDB(Mysqld):
    name = "mariadb"
    packages = ("mariadb-server",)

    def missing(self) -> str | None:
        if _program("mariadbd") is None:
            return f"MariaDB's server is missing; {apt.hint(self.packages)}"
        return None

    def fetch(self) -> None:
        ask = [str(_program("mariadbd")), "--version"]
        said = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        version = re.sub(r"[^\w.+~-]+", "-", said.split("Ver ", 1)[-1].split(" for ")[0])
        self.template = cached(f"mariadb-{version}-data", self._initialise)

    def server(self) -> Sequence[str]:
        return [str(_program("mariadbd")), "--no-defaults", "--feedback=OFF"]

    def _initialise(self, target: Path) -> None:
        options = ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
        command = ["mariadb-install-db", "--no-defaults", f"--datadir={target}", *options, *as_root()]
        process.run_or_raise(command)


def _program(name: str) -> str | None:
    # Debian keeps it where the PATH of an ordinary user does not look.
    return shutil.which(name) or shutil.which(name, path="/usr/sbin")
