"""The processes of a run: relays and writers, started, killed, stopped and ended by their ids."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from pathlib import Path

from proof.databases.base import Database
from proof.network import Network
from proof.proxy import Proxy
from proof.worker import Orders
from proof.worker import as_argument as worker_argument
from proof.writer import Load
from proof.writer import as_argument as writer_argument


@dataclass(slots=True)
class Worker:
    """A relay that was started."""

    name: str
    process: subprocess.Popen[bytes]
    to_database: Proxy | None
    to_broker: Proxy | None

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def arm(self, point: str) -> None:
        """Have it kill itself at that point; an empty one takes that back."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{point}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            return

    def signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            self.process.send_signal(number)

    def wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


class Crew:
    """All of them; ``close`` leaves none behind."""

    def __init__(self, folder: Path, orders: Orders, database: Database, network: Network) -> None:
        self.folder = folder
        self.network = network
        self._database = database
        self.orders = orders
        self.workers: list[Worker] = []
        self.writers: list[subprocess.Popen[bytes]] = []
        self._number = 0

    def start_worker(self, clock: str | None = None) -> Worker:
        """``clock``: how far off its clock is, such as ``+1h``."""
        self._number += 1
        name = f"w{self._number}"
        orders = replace(self.orders, name=name)
        to_database, to_broker = self.network.to_database(), None
        if to_database is not None:
            orders.store = self._database.through(to_database.port)
        if self.network.broker:
            to_broker = self.network.broker[self._number % len(self.network.broker)]
            orders.broker = {**orders.broker, "servers": f"127.0.0.1:{to_broker.port}"}
        process = self._start("proof.worker", name, worker_argument(orders), _clock(clock))
        worker = Worker(name, process, to_database, to_broker)
        self.workers.append(worker)
        return worker

    def start_writer(self, load: Load) -> None:
        self.writers.append(self._start("proof.writer", load.name, writer_argument(load), {}))

    def _start(self, module: str, name: str, argument: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, argument],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )

    def peak_mb(self) -> float:
        """The most memory that a relay has used."""
        return max((_peak_mb(worker.process.pid) for worker in self.alive), default=0.0)

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_alive]

    def stop_writers(self) -> None:
        for writer in self.writers:
            writer.terminate()
        for writer in self.writers:
            try:
                writer.wait(60)
            except subprocess.TimeoutExpired:
                writer.kill()
                writer.wait()

    def stop_workers(self, seconds: float = 30.0) -> list[str]:
        """SIGTERM to all; the names of those that did not end by themselves."""
        for worker in self.alive:
            worker.signal(signal.SIGCONT)
            worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        late = [worker.name for worker in self.workers if not worker.wait(max(0.1, deadline - time.monotonic()))]
        self.close()
        return late

    def close(self) -> None:
        for process in (*(worker.process for worker in self.workers), *self.writers):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def _peak_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it ended meanwhile
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


def _clock(offset: str | None) -> dict[str, str]:
    if offset is None:
        return {}
    library = distribution("libfaketime").locate_file("libfaketime/vendor/libfaketime/src/libfaketime.so.1")
    return {"LD_PRELOAD": str(library), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
