"""The real command as a subprocess, for the tests of the command line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

COMMAND = [sys.executable, "-W", "error", "-m", "pillarbox"]


class Ended(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    def failed(self, code: int, *said: str) -> None:
        """One sentence on standard error, no traceback, nothing on standard output."""
        assert self.code == code, (self.out, self.err)
        assert self.err.startswith("pillarbox: ")
        assert self.err.count("\n") == 1, self.err
        for words in said:
            assert words in self.err


class Command:
    """``pillarbox`` in a folder of its own, with an outbox to work on."""

    def __init__(self, folder: Path, url: str, prefix: str = "outbox") -> None:
        self.folder = folder
        self.variables = {"PILLARBOX_STORE": url, "PILLARBOX_PREFIX": prefix}

    def environment(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith("PILLARBOX_")}
        return others | self.variables | dict(variables or {})

    def __call__(self, *words: str, stdin: bytes = b"", variables: Mapping[str, str] | None = None) -> Ended:
        ended = subprocess.run(
            [*COMMAND, *words],
            cwd=self.folder,
            env=self.environment(variables),
            input=stdin,
            capture_output=True,
            timeout=60,
        )
        return Ended(ended.returncode, ended.stdout.decode(), ended.stderr.decode())

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        # A suite that was started in the background ignores Ctrl-C, and so would its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen([*COMMAND, *words], cwd=self.folder, env=self.environment(), **pipes)
        finally:
            signal.signal(signal.SIGINT, before)
