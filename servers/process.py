"""Ports, folders and signals: what every server needs of the operating system."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import psutil

from . import sweeper
from .errors import ServerError

# What `make test` takes at most, with room to grow.
MEMORY_FOR_FILES = 10 << 30
MEMORY_FOR_SERVERS = 6 << 30

_lock = threading.Lock()
_sweeper: subprocess.Popen[str] | None = None
_ports: set[int] = set()
# Not the shared generator: pytest-randomly gives each worker the same seed, so all would try the same ports.
_random = random.SystemRandom()


def free_port() -> int:
    """A port on 127.0.0.1 that nobody uses and that this process did not hand out before.

    It lies below the range of outgoing connections. Inside that range another connection could take the
    port while its server is down, and a client that retries could connect to itself.
    """
    with _lock:
        while True:
            port = _random.randrange(15000, _first_outgoing_port())
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            if port not in _ports:
                _ports.add(port)
                return port


def _first_outgoing_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 32768
    return first if first > 16000 else 32768


def memory_folder() -> Path | None:
    """Where files live in memory, if the machine has enough of it for the servers of a whole suite and their data."""
    folder = Path("/dev/shm")
    try:
        place = os.statvfs(folder)
    except OSError:
        return None
    free = place.f_bavail * place.f_frsize
    # Tests also run programs from their folders.
    usable = os.access(folder, os.W_OK | os.X_OK) and not place.f_flag & os.ST_NOEXEC
    enough = free >= MEMORY_FOR_FILES and psutil.virtual_memory().available >= MEMORY_FOR_FILES + MEMORY_FOR_SERVERS
    return folder if usable and enough else None


def make_folder(name: str, inside: Path | None = None) -> Path:
    """A new folder for one server; deleted by `drop_folder`, or when this process ends in any way."""
    folder = Path(tempfile.mkdtemp(prefix=f"pillarbox-{name}-", dir=inside)).resolve()
    _tell_sweeper(f"+{folder}")
    return folder


def drop_folder(folder: Path) -> None:
    sweeper.kill_in(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        _tell_sweeper(f"-{folder}")


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """Runs a preparing step to its end. Like a server, it does not outlive this process."""
    folder = make_folder("step")
    try:
        everything = {**os.environ, **(environment or {})}
        return subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, check=False)
    finally:
        drop_folder(folder)


def run_or_raise(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    done = run(command, environment)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise ServerError(f"`{' '.join(command)}` ended with exit code {done.returncode}; it said:\n{said}")


def cpu_seconds(pid: int) -> float:
    """The CPU time of a running process. That in /proc has steps of 10 ms, this has none."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock that Linux's clock_getcpuclockid(3) names


def kill(folder: Path) -> None:
    sweeper.kill_in(folder)


def pause(folder: Path) -> None:
    """Stops every process of the server; returns when the last one stands still."""

    def all_stopped() -> bool:
        stopped = True
        for each in sweeper.processes_in(folder):
            with suppress(psutil.NoSuchProcess):
                if each.status() != psutil.STATUS_STOPPED:
                    stopped = False
                    each.send_signal(signal.SIGSTOP)
        return stopped

    wait_until(all_stopped, seconds=10, what="the server to stand still")


def resume(folder: Path) -> None:
    for process in sweeper.processes_in(folder):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def wait_until(ready: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise ServerError(f"gave up after {seconds:g} s of waiting for {what}")
        time.sleep(0.01)


def _tell_sweeper(line: str) -> None:
    global _sweeper
    with _lock:
        if _sweeper is None:
            # In a session of its own, so that Ctrl-C in the terminal does not end it before its work.
            _sweeper = subprocess.Popen(
                [sys.executable, sweeper.__file__], stdin=subprocess.PIPE, text=True, start_new_session=True
            )
            atexit.register(_sweep, _sweeper, os.getpid())
        assert _sweeper.stdin is not None
        # Closed as this process ends: the sweeper deletes what is left.
        if not _sweeper.stdin.closed:
            _sweeper.stdin.write(f"{line}\n")
            _sweeper.stdin.flush()


def _sweep(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() == owner:  # a forked child shares the pipe, and the servers are not its own
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=30)
