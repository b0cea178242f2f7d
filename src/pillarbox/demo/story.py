"""The story of the demo: a shop, a relay that is killed, and the proof that nothing was lost. Needs only SQLite."""

import json
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from pillarbox.demo.crew import BATCH, SLOTS, Crew, DemoFailed, Worker
from pillarbox.demo.frame import Scene, WorkerSeen
from pillarbox.demo.proof import Proof, prove
from pillarbox.demo.screen import Plain, Screen, Silent, choose
from pillarbox.demo.shop import Files, Shop, Snapshot, Window

_TICK_SECONDS: Final = 0.1
_DEADLINE_SECONDS: Final = 20.0
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)


def run(seconds: float, *, is_json: bool) -> int:
    """Run the demo; exit code 1 if the proof fails, 128 plus the signal's number if it was interrupted."""
    screen: Screen = Silent() if is_json else choose(sys.stdout, os.environ)
    try:
        return _run(seconds, is_json, screen)
    finally:
        screen.close()


def _run(seconds: float, is_json: bool, screen: Screen) -> int:
    try:
        with _Signals(screen) as signals, _folder() as folder:
            proof, story = _Demo(folder, seconds, screen, signals).run()
    except _Interrupted as interrupted:
        screen.close()
        screen.say("Interrupted: nothing is proven, and nothing is left behind.")
        return 128 + interrupted.number
    if is_json:
        Plain(sys.stdout).say(json.dumps({**proof.as_dict(), **story}, indent=2))
        return 0 if proof.holds else 1
    return conclude(proof, screen)


def conclude(proof: Proof, screen: Screen) -> int:
    """Print the proof and return the exit code."""
    screen.close()
    screen.say("")
    for line in proof.lines():
        verdict, colour = ("ok", "green") if line.holds else ("BROKEN", "red")
        screen.say(f"{line.name:<12} {line.number:8,}   {verdict:<6} {line.remark}".rstrip(), colour)
    if proof.holds:
        screen.say("The promise held.", "bold")
        return 0
    screen.say("THE PROMISE WAS BROKEN: please report this run.", "red")
    return 1


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that is always removed. A full disk raises DemoFailed."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="pillarbox-demo-", ignore_cleanup_errors=True)
    except OSError as error:
        raise DemoFailed(f"the demo cannot make a folder for its databases: {error.strerror}; {_REMEDY}") from error
    try:
        with folder as name:
            yield Path(name)
    except sqlite3.Error as error:
        raise _disk(error) from error


_REMEDY: Final = "free disk space, or set TMPDIR to a folder that is writable"


def _disk(error: Exception) -> DemoFailed:
    return DemoFailed(f"the demo cannot use its database: {error}; {_REMEDY}")


class _Interrupted(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


class _Signals:
    """Remembers a signal until the demo asks for it: an exception at any line could leave a process behind."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        self._number = number

    def check(self) -> None:
        if self._number == signal.SIGTSTP:
            self._number = None
            self._screen.close()
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._number is not None:
            raise _Interrupted(self._number)


class _Demo:
    def __init__(self, folder: Path, seconds: float, screen: Screen, signals: _Signals) -> None:
        self._third = seconds / 3
        self._files = Files.in_folder(folder)
        self._crew = Crew(folder, self._files)
        self._screen, self._signals = screen, signals
        self._began = time.monotonic()

    def run(self) -> tuple[Proof, dict[str, Any]]:
        """The proof, and the facts of this run."""
        self._files.make()
        shop = Shop(self._files.shop)
        try:
            with closing(Window(self._files)) as window:
                self._shop, self._window = shop, window
                story = self._tell()
                proof = prove(window.placed(), shop.rolled_back, window.deliveries(), slots=SLOTS, batch=BATCH)
                return proof, {**story, "seconds": round(self._passed, 1)}
        finally:
            shop.closed.set()
            self._crew.end()
            if shop.is_alive():
                shop.join()

    def _tell(self) -> dict[str, Any]:
        self._say("A shop takes orders. An order and its event are one SQLite transaction; every fifth is rolled back.")
        first, second = self._start("worker-1"), self._start("worker-2")
        self._shop.start()
        self._watch(
            self._third,
            lambda snapshot: all(worker.name in snapshot.delivered for worker in (first, second)),
            "to deliver",
        )
        in_flight = self._crew.kill(first.name, self._window.in_flight)
        killed_at = time.monotonic()
        events = f"{in_flight} event{'' if in_flight == 1 else 's'} delivered and not yet settled"
        self._say(f"{first.name} is killed with SIGKILL in the middle of a turn: {events}.", "red")
        self._watch(0, lambda snapshot: not any(map(first.owns, snapshot.owners)), "to take over")
        take_over = time.monotonic() - killed_at
        self._say(
            f"{second.name} took over its shards after {take_over:.1f} s, when their leases had run out.", "green"
        )
        self._watch(self._third - take_over)
        third = self._start("worker-3")
        self._watch(self._third, lambda snapshot: any(map(third.owns, snapshot.owners)), "to get its share")
        self._shop.closed.set()
        self._shop.join()
        self._say("The shop is closed. The relays deliver the rest, then they stop.")
        self._drain()
        self._crew.stop()
        self._tick()
        return {
            "killed": first.name,
            "in_flight_at_kill": in_flight,
            "take_over_seconds": round(take_over, 2),
            "deliveries": self._window.snapshot().delivered,
        }

    def _start(self, name: str) -> Worker:
        worker = self._crew.start(name)
        self._say(f"{name} starts (process {worker.process.pid}).")
        return worker

    def _drain(self) -> None:
        # An event that still waits at the deadline counts as lost in the proof.
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while self._tick().waiting and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)

    def _watch(
        self, seconds: float, until: Callable[[Snapshot], bool] = lambda snapshot: True, hope: str = "to go on"
    ) -> None:
        """Show the view for this many seconds, and longer until the condition is true. ``hope`` is for the error."""
        began = time.monotonic()
        while True:
            true = until(self._tick())
            passed = time.monotonic() - began
            if true and passed >= seconds:
                return
            if passed > seconds + _DEADLINE_SECONDS:
                raise DemoFailed(
                    f"waited {passed:.0f} s for the workers {hope}; try again when the machine is less busy"
                )
            time.sleep(_TICK_SECONDS if not true else min(_TICK_SECONDS, seconds - passed))

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._began

    def _say(self, text: str, colour: str = "") -> None:
        self._screen.say(f"{self._passed:5.1f} s  {text}", colour)

    def _tick(self) -> Snapshot:
        self._signals.check()
        self._crew.check()
        if self._shop.error is not None:
            raise _disk(self._shop.error)
        snapshot = self._window.snapshot()
        scene = Scene(self._passed, self._shop.committed, self._shop.rolled_back, snapshot, self._seen(snapshot))
        self._screen.show(scene)
        return snapshot

    def _seen(self, snapshot: Snapshot) -> tuple[WorkerSeen, ...]:
        seen = []
        for worker in self._crew.workers.values():
            shards = frozenset(shard for shard, owner in enumerate(snapshot.owners) if worker.owns(owner))
            state = "serving" if shards or worker.name in snapshot.delivered else "starting"
            state = "killed" if worker.killed else "stopped" if worker.stopped else state
            seen.append(WorkerSeen(worker.name, state, snapshot.delivered.get(worker.name, 0), shards))
        return tuple(seen)
