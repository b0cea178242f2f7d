"""The real command as a process of its own, for the tests of the command line."""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

COMMAND = [sys.executable, "-W", "error", "-m", "pillarbox"]
SECONDS = 60

# A process that has imported the command, and forks itself for each call: most commands take less time than their
# imports. The fork becomes the command and ends as every program does, with all that Python checks at its end.
FORKS = """
import json, os, runpy, signal, socket, sys

import pillarbox.cli, pillarbox.stores.postgres, pillarbox.stores.sqlite

server = socket.socket(fileno=int(sys.argv[1]))
while True:
    order, files, _, _ = socket.recv_fds(server, 1 << 20, 3)
    if not order:
        break
    child = os.fork()
    if child == 0:
        server.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        words, folder, environment = json.loads(order)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[0], sys.argv[1:] = folder, words
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        runpy.run_module("pillarbox", run_name="__main__", alter_sys=True)
        break
    for file in files:
        os.close(file)
    server.send(str(child).encode())
    server.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
"""


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
        if any(name.startswith("PYTHON") for name in variables or {}):  # for the interpreter, when it starts
            environment = self.environment(variables)
            options: dict[str, Any] = {"cwd": self.folder, "env": environment, "capture_output": True}
            ended = subprocess.run([*COMMAND, *words], input=stdin, timeout=SECONDS, **options)
            return Ended(ended.returncode, ended.stdout.decode(), ended.stderr.decode())
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            code = _fork(
                [words, str(self.folder), self.environment(variables)], [f.fileno() for f in (given, out, err)]
            )
            out.seek(0)
            err.seek(0)
            return Ended(code, out.read().decode(), err.read().decode())

    def start(self, *words: str, **options: Any) -> "Started":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        # A suite that was started in the background ignores Ctrl-C, and so would its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return Started([*COMMAND, *words], cwd=self.folder, env=self.environment(), **pipes)
        finally:
            signal.signal(signal.SIGINT, before)


class Started(subprocess.Popen[bytes]):
    """Killed if its test fails inside its block, which would wait for it otherwise."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()
        super().__exit__(kind, error, trace)


@functools.cache
def _forks() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-W", "error", "-c", FORKS, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _fork(order: Any, files: Sequence[int]) -> int:
    server = _forks()
    server.settimeout(SECONDS)
    socket.send_fds(server, [json.dumps(order).encode()], files)
    child = int(server.recv(20))
    try:
        return int(server.recv(20))
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        server.recv(20)
        raise AssertionError(f"the command did not end in {SECONDS} s") from None
