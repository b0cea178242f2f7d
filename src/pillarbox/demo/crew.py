"""The worker processes of the demo: started, watched, killed and stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pillarbox.demo.shop import Files
from pillarbox.errors import PillarboxError

# A short lease, so that the take-over can be watched.
LEASE_SECONDS: Final = 2.0
SLOTS: Final = 2
BATCH: Final = 20
_STOP_SECONDS: Final = 10.0
_AIM_SECONDS: Final = 2.0


class DemoFailed(PillarboxError):
    """The demo could not finish."""


@dataclass(slots=True)
class Worker:
    """One relay process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    killed: bool = False
    stopped: bool = False

    def owns(self, owner: str) -> bool:
        """Whether this process owns a shard: a relay adds its pid and a random word to its name."""
        return owner.startswith(f"{self.name}-{self.process.pid}-")

    def why_it_ended(self) -> str:
        code = self.process.returncode
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        words = self.log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(words) if line.strip()), "")
        return f"{how}: {last}" if last else how


class Crew:
    """All workers, including those that were killed."""

    def __init__(self, folder: Path, files: Files, module: str = "pillarbox.demo.worker") -> None:
        self._folder, self._files, self._module = folder, files, module
        self.workers: dict[str, Worker] = {}

    def start(self, name: str) -> Worker:
        command = [sys.executable, "-m", self._module, *self._files, name]
        log = self._folder / f"{name}.log"
        # A worker is stopped by the demo, not by a Ctrl-C that reaches every process of the terminal.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with log.open("wb") as words:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=words)
        except OSError as error:
            raise DemoFailed(
                f"{name} could not be started: {error.strerror}; free memory, processes or disk space"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.workers[name] = Worker(name, process, log)
        return self.workers[name]

    def check(self) -> None:
        """Raise if a worker ended that was not told to."""
        for worker in self.workers.values():
            if not (worker.killed or worker.stopped) and worker.process.poll() is not None:
                raise DemoFailed(f"{worker.name} ended unexpectedly, {worker.why_it_ended()}")

    def kill(self, name: str, in_flight: Callable[[str], int]) -> int:
        """SIGKILL in the middle of a turn; the number of events that it had delivered and not settled."""
        worker = self.workers[name]
        deadline = time.monotonic() + _AIM_SECONDS
        while True:
            # It is stopped while its events are counted: most of the time a worker has none in flight.
            worker.process.send_signal(signal.SIGSTOP)
            _, status = os.waitpid(worker.process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                worker.process.returncode = os.waitstatus_to_exitcode(status)
                self.check()
            unsettled = in_flight(name)
            if unsettled or time.monotonic() > deadline:
                break
            worker.process.send_signal(signal.SIGCONT)
            time.sleep(0.001)
        worker.killed = True
        worker.process.kill()
        worker.process.wait()
        return unsettled

    def stop(self) -> None:
        """Stop cleanly, as a service manager does."""
        alive = [worker for worker in self.workers.values() if not worker.killed]
        self.check()
        for worker in alive:
            worker.stopped = True
            worker.process.send_signal(signal.SIGTERM)
        for worker in alive:
            try:
                worker.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                raise DemoFailed(f"{worker.name} did not stop within {_STOP_SECONDS:.0f} s of SIGTERM") from None
            if worker.process.returncode != 0:
                raise DemoFailed(f"{worker.name} did not stop cleanly, it ended {worker.why_it_ended()}")

    def end(self) -> None:
        """Kill every process that is left."""
        for worker in self.workers.values():
            worker.process.kill()
            worker.process.wait()
            if worker.process.stdin is not None:
                worker.process.stdin.close()
