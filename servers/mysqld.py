"""Shared by MySQL and MariaDB."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

from .base import Server
from .cache import copy

# Both make a root of "localhost", which without name resolution is not 127.0.0.1.
FIRST_STATEMENTS = """\
CREATE USER IF NOT EXISTS 'root'@'127.0.0.1';
GRANT ALL ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;
CREATE DATABASE IF NOT EXISTS test;
"""


class Mysqld(Server):
    ready_line = "ready for connections"
    template: Path
    """An initialised data folder, known after `fetch`."""

    @property
    def url(self) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/test"

    @abstractmethod
    def server(self) -> Sequence[str]:
        """The program and the options that only this one has."""

    def prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir(mode=0o700)
        copy(self.template, data)
        (self.folder / "first.sql").write_text(FIRST_STATEMENTS)

    def command(self) -> Sequence[str]:
        return [
            *self.server(),
            *as_root(),
            f"--datadir={self.folder / 'data'}",
            f"--tmpdir={self.folder}",
            f"--init-file={self.folder / 'first.sql'}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            "--socket=socket",  # inside the data folder: a full path may exceed what the system allows
            f"--pid-file={self.folder / 'pid'}",
            "--skip-name-resolve",
            *(f"--{key}={value}" for key, value in self.settings.items()),
        ]


def as_root() -> Sequence[str]:
    return ["--user=root"] if os.geteuid() == 0 else []
