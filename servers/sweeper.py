"""Ends servers whose test process is gone, however it went: SIGKILL and a closed terminal included.

Run as a script by `process.make_folder`. Reads `+folder` and `-folder` lines; at the end of the input, which
comes with the test process's death, ends every process that works in a listed folder and deletes it.
A parent-death signal would not do: Linux sends it when the starting thread ends, and threads start servers.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil


def processes_in(folder: Path) -> list[psutil.Process]:
    """Every live process whose working folder is inside `folder`.

    Servers are started with their own folder as working folder and their children keep it, even those that
    make a session of their own (PostgreSQL's backends) or outlive their parent.
    """
    inside = f"{folder}/"
    found = []
    for process in psutil.process_iter():
        try:
            if f"{process.cwd()}/".startswith(inside):
                found.append(process)
        except (psutil.Error, FileNotFoundError):
            # Gone, a zombie, or owned by somebody else. psutil raises FileNotFoundError for a process that just ends.
            continue
    return found


def kill_in(folder: Path) -> None:
    """Ends every process in `folder`, also those forked meanwhile; returns when none is left."""
    while processes := processes_in(folder):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        # Not psutil's wait: it would take a child's exit code away from its Popen, and wait for zombies.
        time.sleep(0.005)


def main() -> None:
    folders: set[Path] = set()
    for line in sys.stdin:
        folder = Path(line[1:].rstrip("\n"))
        if line.startswith("+"):
            folders.add(folder)
        else:
            folders.discard(folder)
    for folder in folders:
        kill_in(folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
