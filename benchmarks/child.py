"""Measured processes: each has its own interpreter, as in service."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent


class ChildFailedError(Exception):
    """A measured process ended without an answer."""


class Child:
    """`python -m benchmarks.<module>`: it gets its settings as a line of JSON and answers with such lines.

    It starts at once and waits for its settings. It stops when its input ends, and so also when this process ends.
    python: the interpreter of another environment. It sees this checkout, but no installed package of ours.
    source: the folder from which it imports pillarbox, which may be that of another tree.
    """

    def __init__(
        self,
        module: str,
        settings: dict[str, Any] | None,
        folder: Path,
        python: Path | None = None,
        source: Path | None = None,
    ) -> None:
        self._module = module
        inherited = [] if python else filter(None, [os.environ.get("PYTHONPATH")])
        paths = [*([str(source)] if source else []), str(ROOT), *inherited]
        self._process = subprocess.Popen(
            [str(python or sys.executable), "-m", f"benchmarks.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            text=True,
            # Ctrl-C goes to the harness only, which ends its children.
            start_new_session=True,
        )
        if settings is not None:
            self.tell(settings)

    def tell(self, settings: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def answer(self) -> dict[str, Any]:
        """Wait for the next line of the child."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailedError(f"benchmarks.{self._module} ended with exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def finish(self) -> dict[str, Any]:
        """Tell it to stop, and return its last line."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()


def settings_from_parent() -> dict[str, Any]:
    """For the child: its settings."""
    found: dict[str, Any] = json.loads(sys.stdin.readline())
    return found


def answer(found: dict[str, Any]) -> None:
    """For the child: answer with one line."""
    print(json.dumps(found), flush=True)
