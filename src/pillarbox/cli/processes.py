"""Several processes of one service: a parent that starts them, passes signals on, and replaces one that dies.

Python runs the code of one process on one core. The processes know nothing of each other: they share the work through
the database, like services on several machines.
"""

import logging
import os
import signal
import sys
import threading
import time
from typing import Final

from pillarbox.errors import ConfigError

log = logging.getLogger(__name__)

_PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT)
_WRONG_SETTING: Final = 2
_KILLED: Final = 128  # as a shell says it: 128 and the number of the signal


class Processes:
    """Splits this process into a parent and so many others.

    pause: seconds between two starts of one place, so that a process that cannot live does not fill the log.
    """

    def __init__(self, count: int, *, pause: float = 1.0) -> None:
        if not hasattr(os, "fork"):
            raise ConfigError("--processes is not possible on this system; start a service for each process")
        self._pause = pause
        self._waits = {*_PASSED_ON, signal.SIGCHLD, signal.SIGALRM}
        self._due = dict.fromkeys(range(count), 0.0)  # places without a process: when each may start
        self._running: dict[int, int] = {}  # process id: its place
        self._started: dict[int, float] = {}
        self._asked = False
        self.code = 0  # of the parent, after the split: 0 if each process ended well

    def split(self) -> int | None:
        """Return in each process with its place, and in the parent with None after all have ended."""
        # Signals are taken one by one: none can come between two steps. With its default handler, SIGCHLD may be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._waits)
        on_child = signal.signal(signal.SIGCHLD, lambda *_: None)
        ends = os.pipe()
        place = self._parent()
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.close(ends[1])
        signal.signal(signal.SIGCHLD, on_child)
        if place is None:
            os.close(ends[0])
        else:
            # A group of its own: Ctrl-C in a terminal reaches the parent alone, which passes it on.
            os.setpgid(0, 0)
            threading.Thread(target=_end_with_parent, args=(ends[0],), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return place

    def _parent(self) -> int | None:
        """The parent's work, until all have ended. In a new process it returns at once, with the process's place."""
        while self._due or self._running:
            place = self._fill()
            if place is not None:
                return place
            number = signal.sigwait(self._waits)
            if number in _PASSED_ON:
                self._end(signal.Signals(number))
            elif number == signal.SIGCHLD:
                self._reap()
        return None

    def _fill(self) -> int | None:
        """Start what is due, and be woken for the rest."""
        now = time.monotonic()
        for place in [place for place, at in self._due.items() if at <= now]:
            # What is not written yet would be written by both.
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                return place
            self._running[pid] = place
            self._started[place] = now
            del self._due[place]
        # The timer takes 0 for never.
        signal.setitimer(signal.ITIMER_REAL, max(0.001, min(self._due.values()) - now) if self._due else 0)
        return None

    def _end(self, number: signal.Signals) -> None:
        self._due.clear()
        self._asked = True
        for pid in self._running:
            os.kill(pid, number)

    def _reap(self) -> None:
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ended(pid, self._running.pop(pid), os.waitstatus_to_exitcode(status))

    def _ended(self, pid: int, place: int, code: int) -> None:
        if self._asked or code in (0, _WRONG_SETTING):
            self.code = self.code or (_KILLED - code if code < 0 else code)
            if code == _WRONG_SETTING and not self._asked:
                self._end(signal.SIGTERM)
            return
        self._due[place] = self._started[place] + self._pause
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        log.error(
            "process %d of 'pillarbox' %s; another one takes its place",
            pid,
            how,
            extra={"action": "process_died", "pid": pid},
        )


def _end_with_parent(end: int) -> None:
    """Ask this process to end when its parent is gone, which closes the other end of the pipe."""
    os.read(end, 1)
    os.kill(os.getpid(), signal.SIGTERM)
