"""Environments of the peers: pinned packages in the servers' cache, installed when a row needs them."""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from servers import MissingError
from servers.cache import cached
from servers.process import run

_REQUIREMENTS = Path(__file__).parent / "requirements"
_NO_DOWNLOADS = {"UV_PYTHON_DOWNLOADS": "never"}


@dataclass(frozen=True)
class Environment:
    """The packages of `requirements/<name>.txt`, on our interpreter if it is new enough."""

    name: str
    since: tuple[int, int] = (3, 11)

    def python(self) -> Path:
        """The interpreter of the environment. MissingError says why there is none."""
        base = interpreter(self.since)
        if base is None:
            version = ".".join(map(str, self.since))
            raise MissingError(f"{self.name} needs Python {version} or newer, and none was found")
        wanted = _REQUIREMENTS / f"{self.name}.txt"
        digest = hashlib.sha256(wanted.read_bytes() + str(base).encode()).hexdigest()[:12]

        def build(target: Path) -> None:
            self._install(base, wanted, target)

        found = cached(f"peer-{self.name}-{digest}", build, announce=f"installing {self.name} for the benchmark, once")
        return found / "bin" / "python"

    def _install(self, base: Path, wanted: Path, target: Path) -> None:
        uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
        if uv is None:
            raise MissingError(f"{self.name} is installed by uv, and there is none; run `make env`")
        packages = ["pip", "install", "--quiet", "--require-hashes", "-r", str(wanted)]
        for command in (
            [uv, "venv", "--quiet", "--clear", "--python", str(base), str(target)],
            [uv, *packages, "--python", str(target / "bin" / "python")],
        ):
            done = run(command, _NO_DOWNLOADS)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].strip()
                raise MissingError(f"{self.name} could not be installed, check the network ({reason})")


def interpreter(since: tuple[int, int]) -> Path | None:
    """Our interpreter; else the oldest one of PATH and pyenv that is new enough."""
    if sys.version_info >= since:
        return Path(sys.executable)
    major, first = since
    for minor in range(first, first + 4):
        on_path = shutil.which(f"python{major}.{minor}")
        folder = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
        for found in (on_path, *sorted(folder.glob(f"{major}.{minor}.*/bin/python"))):
            # A shim of pyenv may be on the PATH without an interpreter behind it.
            if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
                return Path(found)
    return None
