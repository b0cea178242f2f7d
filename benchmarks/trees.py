"""The relay of a tree, started with its public commands: this checkout, or one of another commit."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import ROOT

_STOP_SECONDS = 30.0


class TreeError(Exception):
    """A command of a tree failed; the text says which, and how."""


@dataclass(frozen=True)
class Tree:
    """Runs `pillarbox` with the code of this folder, as a user does: no settings but those of the caller."""

    name: str = "this tree"
    root: Path = ROOT

    @property
    def source(self) -> Path:
        return self.root / "src"

    def check(self) -> None:
        """Refuse a folder whose commands would run other code."""
        ask = "import pillarbox; print(pillarbox.__file__)"
        file = self._run(["-c", ask], Path(tempfile.gettempdir()), {}).strip()
        if not Path(file).resolve().is_relative_to(self.root.resolve()):
            raise TreeError(f"{self.name} would import {file}, which is not in {self.root}")

    def init(self, url: str, folder: Path) -> None:
        """Make the tables."""
        self._run(["-m", "pillarbox", "init"], folder, {"PILLARBOX_STORE": url})

    @contextmanager
    def relay(self, url: str, to: str, folder: Path) -> Iterator[int]:
        """Run the relay until the end of the block; gives the id of its process. SIGTERM ends it."""
        log = folder / "relay.log"
        environment = self._environment({"PILLARBOX_STORE": url, "PILLARBOX_TO": to})
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pillarbox", "relay"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C goes to the harness only, which ends the relay.
                start_new_session=True,
            )
        try:
            yield process.pid
            ended = process.poll()
        except Exception as error:
            raise TreeError(f"{error}; the log of the relay of {self.name} ends:\n{_last_lines(log)}") from error
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            finally:
                process.kill()
        if ended is not None or process.returncode:
            raise TreeError(f"the relay of {self.name} ended with exit code {process.returncode}:\n{_last_lines(log)}")

    def _environment(self, settings: dict[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PILLARBOX_")}
        return {**kept, **settings, "PYTHONPATH": str(self.source)}

    def _run(self, arguments: Sequence[str], folder: Path, settings: dict[str, str]) -> str:
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=self._environment(settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode:
            last = "\n".join(ended.stdout.splitlines()[-15:])
            raise TreeError(f"`{' '.join(arguments)}` of {self.name} failed:\n{last}")
        return ended.stdout


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-15:])
